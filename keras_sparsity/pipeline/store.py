"""Tensors that wait from one step to a later one."""

import tensorflow as tf


class Store:
    """First in, first out; sizes may change from entry to entry.

    Args:
        capacity: the largest number of entries.
        specs: list of the `tf.TensorSpec` of an entry's tensors.
    """

    def __init__(self, capacity, specs):
        self._specs = specs
        with tf.init_scope():
            self._queue = tf.queue.FIFOQueue(
                capacity, [spec.dtype for spec in specs]
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

    @property
    def size(self):
        """int32 scalar, the number of entries."""
        return self._queue.size()

    def clear(self):
        """Forgets all entries; eagerly."""
        while int(self.size):
            self._queue.dequeue()
