"""Variables at a server, and operations that hold its mutex."""

import tensorflow as tf


class Cell:
    """A variable at the device under which it is made.

    Clients share it by its name.
    """

    def __init__(self, name, dtype, shape):
        self.dtype, self.shape = tf.as_dtype(dtype), tf.TensorShape(shape)
        self.handle = tf.raw_ops.VarHandleOp(
            dtype=self.dtype, shape=self.shape, shared_name=name, container=""
        )

    def read(self, ids=None):
        """All of it, or the rows of some numbers."""
        if ids is not None:
            return tf.raw_ops.ResourceGather(
                resource=self.handle, indices=ids, dtype=self.dtype
            )
        value = tf.raw_ops.ReadVariableOp(
            resource=self.handle, dtype=self.dtype
        )
        return tf.ensure_shape(value, self.shape)

    def assign(self, value):
        return tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)

    def fill(self, value):
        return self.assign(tf.fill(self.shape, tf.constant(value, self.dtype)))

    def set(self, index, value):
        """Assigns one element of a vector."""
        return self.assign_rows([index], [tf.cast(value, self.dtype)])

    def assign_rows(self, ids, rows):
        return tf.raw_ops.ResourceScatterUpdate(
            resource=self.handle, indices=ids, updates=rows
        )


def destroyed(*handles):
    """Frees the memory of variables, mutexes and queues, by their handles."""
    return tf.group(
        *(tf.raw_ops.DestroyResourceOp(resource=each) for each in handles)
    )


def tokens(name):
    """A queue of int64 scalars, at the device under which it is made.

    Clients share it by its name.
    """
    # More than any has at once.
    return tf.queue.FIFOQueue(2**30, [tf.int64], [[]], shared_name=name)


def packed(count, pairs):
    """A vector of a count and two numbers of each worker.

    One cell has them: all are written at once, or none.

    Args:
        pairs: matrix, a row for each worker.
    """
    return tf.concat([[count], tf.reshape(pairs, [-1])], 0)


def unpacked(vector):
    """`(count, pairs)` of what `packed` has made."""
    return vector[0], tf.reshape(vector[1:], [-1, 2])


def after(operations, value):
    """A tensor that is there once operations have ended."""
    with tf.control_dependencies(operations):
        return tf.identity(value)


def locked(mutex, build):
    """The results of operations that run while a mutex is held.

    The lock is also given back if one of them fails. What they need from other
    devices must be there before: a worker may stop while it sends it.

    Args:
        mutex: a resource.
        build: function that makes the operations and returns tensors.
    """
    lock = tf.raw_ops.MutexLock(mutex=mutex)
    with tf.control_dependencies([lock]):
        results = build()
    with tf.control_dependencies(tf.nest.flatten(results)):
        released = tf.raw_ops.ConsumeMutexLock(mutex_lock=lock)
    with tf.control_dependencies([released]):
        return tf.nest.map_structure(tf.identity, results)
