"""Messages between neighbouring stages."""

import dataclasses
import functools
import itertools
import time

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import keras_losses
from keras_sparsity.collectives.base import divided
from keras_sparsity.collectives.speeds import idle_share
from keras_sparsity.collectives.wire import Wire

# Elements of a message that measures a link: 0.2 s at 50 Mbit/s.
_PROBE = 320_000
# Processor times of single ones may be three times as long.
_NUM_PROBES = 5


class Link:
    """The way between two neighbouring stages.

    Both trace the same messages in the same order. Tensors of one dtype travel
    in one message, while the stages compute.

    Args:
        pair: `Collectives` of the two ranks; the first one's stage is before
            the other's.
        wire_dtype: name of the dtype in which wider floats travel, or None.

    Attributes:
        pairs: list of `pair` alone. See `Fan.pairs`.
    """

    def __init__(self, pair, wire_dtype=None):
        self.pairs = [pair]
        self._pair, self._wire_dtype = pair, wire_dtype

    def of(self, batch):
        """The link for a micro-batch: this one. See `Fan.of`."""
        del batch
        return self

    def wire(self, dtype):
        """The `Wire` of activations and gradients of a dtype."""
        dtype = tf.as_dtype(dtype)
        if not (dtype.is_floating and self._wire_dtype):
            return Wire(dtype, dtype)
        asked = tf.as_dtype(self._wire_dtype)
        return Wire(dtype, min(dtype, asked, key=lambda each: each.size))

    def send_activations(self, crossing, tensors, loss):
        """Sends the tensors that cross the cut, and their masks.

        Args:
            crossing: `Crossing` of these tensors.
            tensors: list.
            loss: float32 scalar, the share of the loss that the stages so far
                have made.
        """
        crossing.broadcast(self._pair, tensors, None, 0, [loss], self.wire)

    def receive_activations(self, crossing, num_examples):
        """The tensors, with their masks, and the loss of a micro-batch."""
        tensors, (loss,) = crossing.broadcast(
            self._pair, None, num_examples, 0, [tf.zeros([])], self.wire
        )
        return tensors, loss

    def send_gradients(self, tensors, numbers=()):
        """Sends gradients of activations, and numbers in their own dtype."""
        encoded = [self.wire(each.dtype).encode(each) for each in tensors]
        if encoded or numbers:
            self._pair.broadcast(
                [*encoded, *numbers], root=1, name="pipeline/gradients"
            )

    def receive_gradients(self, sent, numbers=()):
        """Gradients of tensors that were sent.

        Args:
            sent: list of these tensors.
            numbers: list of tensors of the shapes of those that come along.

        Returns:
            List of the gradients and then of the numbers.
        """
        if not (sent or numbers):
            return []
        wires = [self.wire(each.dtype) for each in sent]
        shapes = [
            tf.zeros_like(each, wire.dtype)
            for each, wire in zip(sent, wires, strict=True)
        ]
        received = self._pair.broadcast(
            [*shapes, *numbers], root=1, name="pipeline/gradients"
        )
        decoded = [
            wire.decode(each)
            for wire, each in zip(wires, received, strict=False)
        ]
        return [*decoded, *received[len(sent) :]]

    def seconds_per_byte(self):
        """Measures the link; eagerly, on both ranks at once.

        Of float32 before they are cast for the link.

        Returns:
            `(seconds until a byte has arrived, processor seconds of this rank
            for it)`.
        """
        idle = idle_share()
        # The first messages make connections.
        times = [
            (self._round_trip(0, idle), self._round_trip(_PROBE, idle))
            for _ in range(1 + _NUM_PROBES)
        ]
        empty, full = np.median(times[1:], axis=0)
        return tuple(np.maximum(0.0, full - empty) / (4 * _PROBE))

    def _round_trip(self, num_floats, idle):
        """`(seconds, processor seconds)` until a receiver has answered."""
        begin, worked = time.perf_counter(), time.process_time()
        for root, size in ((0, 1 + num_floats), (1, 1)):
            floats = self.wire(tf.float32).encode(tf.zeros([size]))
            (received,) = self._pair.broadcast(
                [floats], root=root, name="pipeline/probe"
            )
            received.numpy()
        seconds = time.perf_counter() - begin
        return seconds, time.process_time() - worked - idle * seconds


@dataclasses.dataclass(frozen=True)
class Crossing:
    """The tensors that cross a cut, as they travel.

    Attributes:
        tensors: tuple of the model's symbolic tensors.
    """

    tensors: tuple

    @property
    def specs(self):
        """`tf.TensorSpec`s of the tensors and then of their masks."""
        masks = [keras_losses.keras_mask(tensor) for tensor in self.tensors]
        return [
            tf.TensorSpec(each.shape, each.dtype)
            for each in [*self.tensors, *(m for m in masks if m is not None)]
        ]

    def broadcast(
        self,
        collectives,
        tensors,
        num_examples,
        root,
        numbers=(),
        wire=lambda dtype: Wire(dtype, dtype),
    ):
        """The values of one rank, with their masks, on all ranks of a group.

        Args:
            collectives: `Collectives` of the group.
            tensors: list of the values at the sending rank, None at others.
            num_examples: int32 scalar, at others: the number of examples.
            root: the sending rank.
            numbers: list of tensors that travel along, of the same shapes on
                all ranks.
            wire: function from a dtype of the tensors to its `Wire`.

        Returns:
            `(tensors, numbers)`, two lists.
        """
        is_root = collectives.rank == root
        wires = [wire(spec.dtype) for spec in self.specs]
        values, sizes = [], None
        if is_root:
            values = self.with_masks(tensors)
            if collectives.size > 1:
                self._check_dtypes(values)
            sizes = self.unknown_sizes(values)
        if self.num_unknown:
            if not is_root:
                sizes = tf.zeros([self.num_unknown], tf.int32)
            (sizes,) = collectives.broadcast(
                [sizes], root=root, name="pipeline/sizes"
            )
        if not is_root:
            # Only their shapes count.
            values = [
                tf.zeros(shape, spec.dtype)
                for shape, spec in zip(
                    self.shapes(num_examples, sizes), self.specs, strict=True
                )
            ]
        encoded = [
            each.encode(value)
            for each, value in zip(wires, values, strict=True)
        ]
        received = collectives.broadcast(
            [*encoded, *numbers], root=root, name="pipeline/activations"
        )
        values, numbers = received[: len(values)], received[len(values) :]
        values = [
            each.decode(value)
            for each, value in zip(wires, values, strict=True)
        ]
        for value, spec in zip(values, self.specs, strict=True):
            value.set_shape(spec.shape)
        return self.without_masks(values), numbers

    def _check_dtypes(self, values):
        """Raises ValueError of values that the receivers do not expect.

        No cut is where such tensors cross; but a model may have them as
        outputs, which `predict` gives all ranks.
        """
        for value, spec in zip(values, self.specs, strict=True):
            if value.dtype != spec.dtype:
                raise ValueError(
                    "The ranks make room for a model's outputs by its symbolic "
                    f"ones. Received: an output of {value.dtype.name}; "
                    f"expected: {spec.dtype.name}, as its layer says. Let the "
                    "layer say the right one (`compute_output_spec`; a "
                    "`Lambda` without `output_shape`)."
                )

    def with_masks(self, tensors):
        """A list of the values and then of the masks that they carry.

        Of a value that has lost its mask one that masks nothing: Keras's
        `MultiHeadAttention` takes away those of its inputs when it computes,
        which the model's symbolic tensors do not tell.
        """
        carried = []
        for symbolic, value in zip(self.tensors, tensors, strict=True):
            expected = keras_losses.keras_mask(symbolic)
            if expected is None:
                continue
            mask = keras_losses.keras_mask(value)
            if mask is None:
                shape = tf.shape(value)[: len(expected.shape)]
                mask = tf.ones(shape, expected.dtype)
            carried.append(mask)
        return [*tensors, *carried]

    def without_masks(self, received):
        """The values, which carry their masks."""
        values = received[: len(self.tensors)]
        masks = iter(received[len(self.tensors) :])
        for symbolic, value in zip(self.tensors, values, strict=True):
            if keras_losses.keras_mask(symbolic) is not None:
                keras_losses.set_keras_mask(value, next(masks))
        return values

    @property
    def num_unknown(self):
        """The number of sizes that the model does not know, but the batch's."""
        return sum(list(spec.shape[1:]).count(None) for spec in self.specs)

    def unknown_sizes(self, tensors):
        """int32 vector of these sizes, None if there are none."""
        sizes = [
            tf.shape(tensor)[axis]
            for tensor, spec in zip(tensors, self.specs, strict=True)
            for axis in range(1, spec.shape.rank)
            if spec.shape[axis] is None
        ]
        return tf.stack(sizes) if sizes else None

    def shapes(self, num_examples, sizes):
        """List of shapes, of a micro-batch's examples and the sent sizes."""
        found, place = [], 0
        for spec in self.specs:
            shape = [num_examples]
            for size in spec.shape[1:]:
                if size is None:
                    size, place = sizes[place], place + 1
                shape.append(size)
            found.append(tf.stack(shape))
        return found


@functools.cache
def peers(collectives, num_ranks):
    """`Collectives` of the ranks of this rank's stage.

    Args:
        num_ranks: tuple of the number of ranks of each stage.
    """
    ends = list(itertools.accumulate(num_ranks))
    groups = [
        list(range(end - number, end))
        for number, end in zip(num_ranks, ends, strict=True)
    ]
    label = "/".join(map(str, num_ranks))
    return divided(collectives, groups, f"pipeline/peers/{label}")
