"""Tensors that wait from one step to a later one."""

import tensorflow as tf


class Store:
    """First in, first out; sizes may change from entry to entry.

    Each turn puts an entry, from one on, and each takes one, from another on.

    Args:
        specs: list of the `tf.TensorSpec` of an entry's tensors.
        put: the first turn that puts one.
        taken: the first turn that takes one.
    """

    def __init__(self, specs, put=0, taken=0):
        self._specs, self._put, self._taken = specs, put, taken
        with tf.init_scope():
            # A turn may put one before it takes one.
            self._queue = tf.queue.FIFOQueue(
                taken - put + 1, [spec.dtype for spec in specs]
            )

    def put(self, tensors):
        """Adds an entry, a list of tensors."""
        self._queue.enqueue(tensors)

    def take(self):
        """The oldest entry, a list."""
        taken = self._queue.dequeue()
        if len(self._specs) == 1:
            taken = [taken]
        for tensor, spec in zip(taken, self._specs, strict=True):
            tensor.set_shape(spec.shape)
        return list(taken)

    def take_if(self, condition):
        """The oldest entry on a condition; else tensors without elements."""
        taken = tf.nest.flatten(
            tf.cond(condition, self.take, lambda: nothing(self._specs))
        )
        for tensor, spec in zip(taken, self._specs, strict=True):
            if not tf.executing_eagerly():
                tensor.set_shape(spec.shape)
        return taken

    @property
    def size(self):
        """int32 scalar, the number of entries."""
        return self._queue.size()

    def holds(self, turn):
        """Whether it has the entries after so many turns; eagerly."""
        number = min(max(turn - self._put, 0), self._taken - self._put)
        return int(self.size) == number

    def clear(self):
        """Forgets all entries; eagerly."""
        while int(self.size):
            self._queue.dequeue()


def nothing(specs):
    """Tensors of these `tf.TensorSpec`s, without elements."""
    return [
        tf.zeros([size or 0 for size in spec.shape], spec.dtype)
        for spec in specs
    ]
