"""Counts of the workers' steps, and the bound on their differences."""

import numpy as np
import tensorflow as tf

from keras_sparsity.asynchronous.batches import none_of_each
from keras_sparsity.asynchronous.cells import (
    Cell,
    after,
    destroyed,
    locked,
    packed,
    tokens,
    unpacked,
)

# The clock of a worker that takes no further step in this epoch.
_DONE = 2**62
# More than all servers' processes that wait for the end of an epoch.
_MANY = 1000


class Clocks:
    """Operations of a session's graph on the counts at one server.

    A worker may begin a step if it is at most `bound` steps ahead of the
    slowest. It takes a token from a queue of its own, in which the server
    waits with it; whenever the slowest worker ends a step, all queues get one.

    A step ends when all servers have applied its push. So the pull of step k
    sees the updates of all steps before k - bound, of each worker, also of the
    worker itself: its own last push may be under way with a bound of at least
    1.

    The batches of the steps that have ended are counted, each once: one that
    is handed out again, see `Batches`, is among the last two of a worker.

    Args:
        device, size, rank, name: as for `Batches`; a dedicated server takes no
            steps.
        bound: the number of steps, None for any.

    Attributes:
        device: the argument.
    """

    def __init__(self, device, size, rank, bound, name):
        self._size, self._rank, self._bound = size, rank, bound
        self.device = device
        with tf.device(device):
            self._mutex = tf.raw_ops.MutexV2(shared_name=f"{name}/mutex")
            self._clocks = Cell(f"{name}/steps", tf.int64, [size])
            # The number of the batches, and for each worker the last one but
            # one, and the last one; also of those that take none any more.
            self._batches = Cell(f"{name}/ended", tf.int64, [1 + 2 * size])
            self._tokens = [tokens(f"{name}/tokens/{r}") for r in range(size)]
            # Gets tokens when all workers have taken their last step.
            self._over = tokens(f"{name}/over")
            self.reset = self._made_reset()

    def destroy(self):
        queues = [queue.queue_ref for queue in [*self._tokens, self._over]]
        with tf.device(self.device):
            cells = self._clocks.handle, self._batches.handle
            return destroyed(self._mutex, *cells, *queues)

    def begin(self):
        """Waits for the bound; returns how long, by the server's clock."""
        with tf.device(self.device):
            asked = tf.timestamp()
            with tf.control_dependencies([asked]):
                token = self._tokens[self._rank].dequeue()
            with tf.control_dependencies([token]):
                return tf.timestamp() - asked

    def over(self):
        """Waits until no worker takes a further step in this epoch."""
        with tf.device(self.device):
            return self._over.dequeue()

    def restore(self):
        """Makes `(feeds, fetches)` of giving a token that was taken in vain.

        It may have been taken, or not. Feeds: how many steps this worker has
        begun with one.
        """
        with tf.device(self.device):
            begun = tf.compat.v1.placeholder(tf.int64, [])
            queue = self._tokens[self._rank]

            def restored():
                slowest = tf.reduce_min(self._clocks.read())
                left = tf.cast(queue.size(), tf.int64)
                number = slowest + 1 + self._bound - begun - left
                # All are done if this worker is taken for lost.
                is_any = (number > 0) & tf.not_equal(slowest, _DONE)
                number = tf.where(is_any, number, tf.zeros_like(number))
                return after([_given(queue, number)], number)

            return [begun], [locked(self._mutex, restored)]

    def end(self, number, batch=None):
        """Counts the steps of this worker, now so many, and its batch.

        Without one, of a step that has pushed nothing.
        """

        def ended():
            counted = [] if batch is None else [self._counted(batch)]
            if self._bound is None:
                return after(counted, number)
            with tf.control_dependencies(counted):
                return self._moved(
                    self._rank, lambda clock: tf.maximum(clock, number)
                )

        with tf.device(self.device):
            return locked(self._mutex, ended)

    def _counted(self, batch):
        before = self._batches.read()
        number, last = unpacked(before)
        is_new = tf.reduce_all(tf.not_equal(last, batch))
        own = [last[self._rank, 1], batch]
        last = tf.tensor_scatter_nd_update(last, [[self._rank]], [own])
        now = packed(number + 1, last)
        return self._batches.assign(tf.where(is_new, now, before))

    def ended(self):
        """The number of the epoch's batches whose steps have ended.

        Returns:
            It, and the last two of each worker.
        """
        with tf.device(self.device):
            return unpacked(self._batches.read())

    def finish(self, rank):
        """A worker takes no further step."""
        with tf.device(self.device):
            return locked(
                self._mutex,
                lambda: self._moved(rank, lambda clock: tf.fill([], _DONE)),
            )

    def _moved(self, rank, move):
        before = self._clocks.read()
        now = tf.tensor_scatter_nd_update(
            before, [[rank]], [move(before[rank])]
        )
        slowest, earlier = tf.reduce_min(now), tf.reduce_min(before)
        are_done = tf.equal(slowest, _DONE)
        # After the last worker's last step nobody waits any more.
        number = tf.where(are_done, tf.zeros_like(slowest), slowest - earlier)
        given = [_given(queue, number) for queue in self._tokens]
        is_over = are_done & tf.not_equal(earlier, _DONE)
        given.append(_given(self._over, tf.where(is_over, _MANY, 0)))
        # Tokens first: if this worker is lost meanwhile, the next move gives
        # them again. The others would wait for those that nobody gives.
        with tf.control_dependencies(given):
            moved = self._clocks.assign(now)
        return after([moved], slowest)

    def _made_reset(self):
        """All workers are at the beginning of an epoch; none runs a step."""
        emptied = [
            queue.dequeue_many(queue.size())
            for queue in [*self._tokens, self._over]
        ]
        with tf.control_dependencies(emptied):
            number = (self._bound or 0) + 1
            given = [_given(queue, number) for queue in self._tokens]
            none = packed(np.int64(0), none_of_each(self._size))
            begun = [self._clocks.fill(0), self._batches.assign(none)]
        return tf.group(*given, *begun)


def _given(queue, number):
    """Puts so many tokens into a queue."""
    return queue.enqueue_many([tf.zeros([number], tf.int64)])
