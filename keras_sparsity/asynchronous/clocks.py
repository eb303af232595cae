"""Counts of the workers' steps, and the bound on their differences."""

import tensorflow as tf

from keras_sparsity.asynchronous.cells import Cell, after, locked, tokens

# The clock of a worker that takes no further step in this epoch.
_DONE = 2**62


class Clocks:
    """Operations of a session's graph on the counts at one server.

    A worker may begin a step if it is at most `bound` steps ahead of the
    slowest. It takes a token from a queue of its own, in which the server
    waits with it; whenever the slowest worker ends a step, all queues get one.

    A step ends when all servers have applied its push. So the pull of step k
    sees the updates of all steps before k - bound, of each worker, also of the
    worker itself: its own last push may be under way with a bound of at least
    1.

    Args:
        device, size, rank, name: as for `Batches`; a dedicated server takes no
            steps.
        bound: the number of steps, None for any.
    """

    def __init__(self, device, size, rank, bound, name):
        self._size, self._rank, self._bound = size, rank, bound
        with tf.device(device):
            self._mutex = tf.raw_ops.MutexV2(shared_name=f"{name}/mutex")
            self._clocks = Cell(f"{name}/steps", tf.int64, [size])
            self._tokens = [tokens(f"{name}/tokens/{r}") for r in range(size)]
            # Gets a token when all workers have taken their last step.
            self._over = tokens(f"{name}/over")
            self.reset = self._made_reset()
        self._device = device

    def begin(self):
        """Waits for the bound; returns how long, by the server's clock."""
        with tf.device(self._device):
            asked = tf.timestamp()
            with tf.control_dependencies([asked]):
                token = self._tokens[self._rank].dequeue()
            with tf.control_dependencies([token]):
                return tf.timestamp() - asked

    def over(self):
        """Waits until no worker takes a further step in this epoch."""
        with tf.device(self._device):
            token = self._over.dequeue()
            # For the next one that waits.
            with tf.control_dependencies([self._over.enqueue(token)]):
                return tf.identity(token)

    def end(self):
        """Counts a step of this worker."""
        with tf.device(self._device):
            return self._moved(
                self._rank, lambda clock: tf.minimum(clock + 1, _DONE)
            )

    def finish(self, rank):
        """A worker takes no further step."""
        with tf.device(self._device):
            return self._moved(rank, lambda clock: tf.fill([], _DONE))

    def _moved(self, rank, move):
        def moved():
            before = self._clocks.read()
            now = tf.tensor_scatter_nd_update(
                before, [[rank]], [move(before[rank])]
            )
            slowest, earlier = tf.reduce_min(now), tf.reduce_min(before)
            are_done = tf.equal(slowest, _DONE)
            # After the last worker's last step nobody waits any more.
            number = tf.where(
                are_done, tf.zeros_like(slowest), slowest - earlier
            )
            given = [_given(queue, number) for queue in self._tokens]
            is_over = are_done & tf.not_equal(earlier, _DONE)
            given.append(_given(self._over, tf.cast(is_over, tf.int64)))
            return after([*given, self._clocks.assign(now)], slowest)

        return locked(self._mutex, moved)

    def _made_reset(self):
        """All workers are at the beginning of an epoch; none runs a step."""
        emptied = [
            queue.dequeue_many(queue.size())
            for queue in [*self._tokens, self._over]
        ]
        with tf.control_dependencies(emptied):
            number = (self._bound or 0) + 1
            given = [_given(queue, number) for queue in self._tokens]
            begun = self._clocks.assign(tf.zeros([self._size], tf.int64))
        return tf.group(*given, begun)


def _given(queue, number):
    """Puts so many tokens into a queue."""
    return queue.enqueue_many([tf.zeros([number], tf.int64)])
