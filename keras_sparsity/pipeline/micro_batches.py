"""The micro-batches of a batch."""

import copy

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_functional

# Set on the sample weights of a part: their share of the batch's sum.
_SHARE = "_keras_sparsity_share"


class MicroBatches:
    """A batch, divided; parts differ in size by one example at most.

    A part without examples, of a batch smaller than the number of parts, has
    one of its neighbour's as a stand-in, and counts for nothing: its share is
    0, and a stage keeps its `states` (`is_empty`). A `place` is
    the number of a part, or a range of such numbers: these parts as one.

    Args:
        functional: the model's `Functional`.
        data: a batch, as `train_step` gets it.
        number: the number of parts.
        num_pieces: the number of pieces of a part, as even. A place is then
            that of pieces.

    Attributes:
        num_examples: int32 scalar, of the whole batch.
        batch: `(x, y, sample_weight)` of the whole batch.
    """

    def __init__(self, functional, data, number, num_pieces=1):
        x, *rest = keras.utils.unpack_x_y_sample_weight(data)
        # As Keras makes inputs that say nothing of it dense.
        x = keras.tree.map_structure(_dense, x)
        # An eager `train_on_batch` hands arrays on.
        y, sample_weight = keras.tree.map_structure(_tensor, rest)
        self.batch = x, y, sample_weight
        inputs = keras_functional.flat_inputs(functional, x)
        self._parts = inputs, x, y, sample_weight
        self.num_examples = tf.shape(inputs[0])[0]
        self._number, self._num_pieces = number, num_pieces

    def held(self, stage):
        """The tensors that a `Stage` computes with, in any structure."""
        inputs, *labels = self._parts
        needed = {place: inputs[place] for place in stage.part.inputs}
        return needed, labels if stage.is_last else [], self.num_examples

    def again(self, held):
        """These of another batch, of which a stage has `held` the tensors."""
        inputs, labels, num_examples = held
        found = self.of_size(num_examples)
        found.batch = tuple(labels or [None] * 3)
        found._parts = inputs, *found.batch
        return found

    def of_size(self, num_examples):
        """These of a batch of which the number of examples is known alone."""
        found = copy.copy(self)
        found.num_examples = num_examples
        return found

    def part(self, place):
        """`(inputs, x, y, sample_weight)`, of one part.

        The weights of one of several have their `share_of_weights`.
        """
        begin = tf.minimum(self._begin(start(place)), self.num_examples - 1)
        end = begin + self.size(place)
        part = keras.tree.map_structure(
            lambda tensor: None if tensor is None else tensor[begin:end],
            self._parts,
        )
        if self.is_part(place):
            keras.tree.map_structure(_note_share, part[-1], self._parts[-1])
        return part

    def number(self, place):
        """int32 scalar: the number of a part's examples."""
        if not isinstance(place, range):
            place = range(place, place + 1)
        return self._begin(place.stop) - self._begin(place.start)

    def _begin(self, place):
        """int32 scalar: the first example of a piece."""
        part, piece = divmod(place, self._num_pieces)
        begin = first_example(self.num_examples, self._number, part)
        if not piece:
            return begin
        end = first_example(self.num_examples, self._number, part + 1)
        return begin + first_example(end - begin, self._num_pieces, piece)

    def size(self, place):
        """int32 scalar: the number of a part's examples, at least 1."""
        return tf.maximum(self.number(place), 1)

    def is_empty(self, place):
        """Whether a part has no examples: False or a scalar bool tensor."""
        if self._number * self._num_pieces == 1:
            return False
        return tf.equal(self.number(place), 0)

    def is_part(self, place):
        """Whether it is not the whole batch."""
        width = len(place) if isinstance(place, range) else 1
        return width < self._number * self._num_pieces

    def share(self, place):
        """float32 scalar: a part's share of the batch."""
        return tf.cast(self.number(place) / self.num_examples, tf.float32)

    def in_order(self, rows, width):
        """Rows in the order of the batch.

        Args:
            rows: those of the ranks that share each part, in rank order.
            width: the number of a rank's pieces of a part.
        """
        if width == self._num_pieces:
            return rows
        places = [
            range(first + own, first + own + width)
            for own in range(0, self._num_pieces, width)
            for first in range(
                0, self._number * self._num_pieces, self._num_pieces
            )
        ]
        parts = tf.split(rows, [self.number(place) for place in places])
        order = sorted(range(len(places)), key=lambda i: places[i].start)
        return tf.concat([parts[i] for i in order], 0)


def start(place):
    """The number of the first part of a place."""
    return place.start if isinstance(place, range) else place


def _dense(value):
    is_sparse = isinstance(value, tf.SparseTensor)
    return tf.sparse.to_dense(value) if is_sparse else value


def _tensor(value):
    is_left = value is None or tf.is_tensor(value)
    return value if is_left else tf.convert_to_tensor(value)


def share_of_weights(sample_weight):
    """The share of a `MicroBatches.part`'s weights, or None of no weights."""
    return getattr(sample_weight, _SHARE, None)


def _note_share(part, whole):
    if whole is not None:
        sums = [
            tf.reduce_sum(tf.cast(each, tf.float32)) for each in (part, whole)
        ]
        setattr(part, _SHARE, tf.math.divide_no_nan(*sums))


def first_example(num_examples, number, place):
    """The first example of a batch's part, as an int32 scalar.

    Args:
        num_examples: int32 scalar, of the whole batch.
        number: the number of parts.
        place: that of the part.
    """
    size, rest = num_examples // number, num_examples % number
    return place * size + tf.minimum(place, rest)
