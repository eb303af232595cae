"""Mini-batches that a stage has read and computes some turns later."""

import tensorflow as tf

from keras_sparsity.pipeline.store import Store


class Unread:
    """`Store`s of the inputs and labels that a stage uses in a later turn.

    A stage receives the activations of a mini-batch in the turn before the one
    in which it computes it.

    Args:
        delay: the number of turns between reading and computing a mini-batch.

    Attributes:
        num_batches: int32 `tf.Variable`, the number of mini-batches so far.
    """

    def __init__(self, stage, delay):
        self._stage, self._delay = stage, delay
        with tf.init_scope():
            self.num_batches = tf.Variable(0, trainable=False)
            self._layout = tf.Variable(0, trainable=False)
        size = tf.TensorSpec([], tf.int32)
        self._sizes = Store([size], 0, max(0, delay - 1))
        self._layouts, self._chosen = [], 0

    def checked(self, batches, turn):
        """Learns the layout of a mini-batch, traced.

        Args:
            batches: its `MicroBatches`.
            turn: int32 scalar, the number of earlier turns.

        Returns:
            List of operations for which the step waits. They fail, on all
            ranks, if mini-batches of another layout are in flight.
        """
        every = _tensors(batches.batch)
        specs = list(map(_spec, every))
        known = [each.specs for each in self._layouts]
        if specs not in known:
            known.append(specs)
            held = batches.held(self._stage)
            self._layouts.append(_Layout(batches, held, specs, self._delay))
        self._chosen = known.index(specs)
        is_alike = tf.equal(turn, 0) | tf.equal(self._layout, self._chosen)
        check = tf.debugging.Assert(is_alike, [_ANOTHER_LAYOUT])
        return [] if check is None else [check]

    def put(self, batches, turn):
        """Keeps a mini-batch that is `checked`, traced."""
        self._layout.assign(self._chosen)
        self.num_batches.assign(turn + 1)
        if self._delay:
            self._sizes.put([batches.num_examples])
            held = batches.held(self._stage)
            self._layouts[self._chosen].store.put(_tensors(held))

    def take(self):
        """`MicroBatches` of the mini-batch whose turn has come, traced."""
        return self._layouts[self._chosen].take()

    def take_size(self):
        """`MicroBatches` of the next mini-batch, which know its sizes alone."""
        (number,) = self._sizes.take()
        return self._layouts[self._chosen].batches.of_size(number)

    def choose_layout(self):
        """Chooses the layout of the mini-batches in flight; its number."""
        self._chosen = int(self._layout)
        return self._chosen

    def holds(self, turn):
        """Whether it has those that are not used after so many turns."""
        in_flight = int(self._layout)
        return self._sizes.holds(turn) and all(
            each.store.holds(turn if number == in_flight else 0)
            for number, each in enumerate(self._layouts)
        )

    def clear(self):
        """Forgets all; eagerly."""
        for store in (self._sizes, *(each.store for each in self._layouts)):
            store.clear()


class _Layout:
    """Mini-batches of one structure and one shape but the batch's size."""

    def __init__(self, batches, held, specs, delay):
        self.batches, self._held, self.specs = batches, held, specs
        self.store = Store(list(map(_spec, _tensors(held))), 0, delay)

    def take(self):
        values = iter(self.store.take())
        flat = [
            None if each is None else next(values)
            for each in tf.nest.flatten(self._held, expand_composites=True)
        ]
        return self.batches.again(
            tf.nest.pack_sequence_as(self._held, flat, expand_composites=True)
        )


_ANOTHER_LAYOUT = (
    "With `messages_ahead`, the mini-batches in flight have the same structure "
    "and the same shapes, but for the number of examples. Received: one of "
    "another layout. Call `model.evaluate` or end the epoch in between."
)


def _tensors(held):
    flat = tf.nest.flatten(held, expand_composites=True)
    return [each for each in flat if each is not None]


def _spec(tensor):
    """`tf.TensorSpec` of such tensors of batches of any number of examples."""
    shape = tensor.shape
    if tf.executing_eagerly():
        shape = None  # each tensor knows its own
    elif shape.rank:
        shape = [None, *shape[1:]]
    return tf.TensorSpec(shape, tensor.dtype)
