"""Counts of the workers' steps, and the bound on their differences."""

import tensorflow as tf

# The clock of a worker that takes no further step in this epoch.
_DONE = 2**62


class Clocks:
    """Operations of a session's graph on the counts at one server.

    A worker may begin a step if it is at most `bound` steps ahead of the
    slowest. It takes a token from a queue of its own, in which the server
    waits with it; whenever the slowest worker ends a step, all queues get one.

    Args:
        device: the server's device.
        size: the number of workers.
        rank: this worker.
        bound: the number of steps, None for any.
        name: begins the names by which workers share the counts.
    """

    def __init__(self, device, size, rank, bound, name):
        self._size, self._rank, self._bound = size, rank, bound
        with tf.device(device):
            self._mutex = tf.raw_ops.MutexV2(shared_name=f"{name}/mutex")
            self._clocks = Cell(f"{name}/steps", tf.int64, [size])
            self._next = Cell(f"{name}/next_batch", tf.int64, [])
            self._tokens = [
                tf.queue.FIFOQueue(
                    2**30, [tf.int64], [[]], shared_name=f"{name}/tokens/{r}"
                )
                for r in range(size)
            ]
            self.reset = self._made_reset()
            self.claim = locked(self._mutex, self._claimed)
            self.finish = self._moved(lambda clock: tf.fill([], _DONE))
        self._device = device

    def begin(self):
        """Waits for the bound; returns the clocks of all workers."""
        with tf.device(self._device):
            waits = []
            if self._bound is not None:
                waits.append(self._tokens[self._rank].dequeue())
            with tf.control_dependencies(waits):
                return locked(self._mutex, self._clocks.read)

    def end(self):
        """Counts a step of this worker; returns the clocks of all workers."""
        with tf.device(self._device):
            return self._moved(lambda clock: clock + 1)

    def _moved(self, move):
        def moved():
            before = self._clocks.read()
            after = tf.tensor_scatter_nd_update(
                before, [[self._rank]], [move(before[self._rank])]
            )
            slowest = tf.reduce_min(after)
            # After the last worker's last step nobody waits any more.
            number = tf.where(
                tf.equal(slowest, _DONE),
                tf.zeros_like(slowest),
                slowest - tf.reduce_min(before),
            )
            given = [
                queue.enqueue_many([tf.zeros([number], tf.int64)])
                for queue in self._tokens
            ]
            with tf.control_dependencies([*given, self._clocks.assign(after)]):
                return tf.identity(after)

        return locked(self._mutex, moved)

    def _claimed(self):
        number = self._next.read()
        with tf.control_dependencies([self._next.assign(number + 1)]):
            return tf.identity(number)

    def _made_reset(self):
        """All workers are at the beginning of an epoch; none runs a step."""
        emptied = [queue.dequeue_many(queue.size()) for queue in self._tokens]
        with tf.control_dependencies(emptied):
            given = [
                queue.enqueue_many(
                    [tf.zeros([(self._bound or 0) + 1], tf.int64)]
                )
                for queue in self._tokens
            ]
            cells = [
                self._clocks.assign(tf.zeros([self._size], tf.int64)),
                self._next.assign(tf.zeros([], tf.int64)),
            ]
        return tf.group(*given, *cells)


class Cell:
    """A variable at the device under which it is made.

    Clients share it by its name.

    Args:
        name: its name.
        dtype: its dtype.
        shape: its shape.
    """

    def __init__(self, name, dtype, shape):
        self.dtype, self.shape = tf.as_dtype(dtype), tf.TensorShape(shape)
        self.handle = tf.raw_ops.VarHandleOp(
            dtype=self.dtype, shape=self.shape, shared_name=name, container=""
        )

    def read(self):
        value = tf.raw_ops.ReadVariableOp(
            resource=self.handle, dtype=self.dtype
        )
        return tf.ensure_shape(value, self.shape)

    def assign(self, value):
        return tf.raw_ops.AssignVariableOp(resource=self.handle, value=value)

    def rows(self, ids):
        return tf.raw_ops.ResourceGather(
            resource=self.handle, indices=ids, dtype=self.dtype
        )

    def destroy(self):
        return tf.raw_ops.DestroyResourceOp(resource=self.handle)

    def assign_rows(self, ids, rows):
        return tf.raw_ops.ResourceScatterUpdate(
            resource=self.handle, indices=ids, updates=rows
        )


def locked(mutex, build):
    """The results of operations that run while a mutex is held.

    The lock is also given back if one of them fails.

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
