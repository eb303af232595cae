"""Numbers of an epoch's batches, handed out to the workers by a server."""

import numpy as np
import tensorflow as tf

from keras_sparsity.asynchronous.cells import Cell, locked

# More than any epoch has.
_MANY = np.int64(2**62)
# In place of a number: nothing is left to take; the others go on without you.
NONE, LOST = np.int64(-1), np.int64(-2)


class Batches:
    """Operations of a session's graph on the numbers at one server.

    A worker takes a number, and holds it until it takes the next one: until it
    has pushed the batch's gradient. The number that a lost worker holds is
    handed out again.

    With each number that it takes, a worker leaves a record of all batches
    that it has ended. That of a lost worker remains.

    Args:
        device: the server's device.
        size: the number of workers.
        rank: this worker.
        name: begins the names by which workers share the numbers.
    """

    def __init__(self, device, size, rank, name):
        self._size, self._rank, self._device = size, rank, device
        with tf.device(device):
            self._mutex = tf.raw_ops.MutexV2(shared_name=f"{name}/mutex")
            self._next = Cell(f"{name}/next", tf.int64, [])
            self._total = Cell(f"{name}/total", tf.int64, [])
            self._held = Cell(f"{name}/held", tf.int64, [size])
            self._lost = Cell(f"{name}/lost", tf.bool, [size])
            self._records = Cell(f"{name}/records", tf.string, [size])
            self.create = self._lost.fill(False)
            self.reset = tf.group(
                self._next.fill(0),
                self._total.fill(_MANY),
                self._held.fill(NONE),
                self._records.fill(""),
            )
            self.records = self._records.read()

    def take(self):
        """Makes `(feeds, fetches)` of taking a number.

        Feeds: the record. Fetches: the number, `NONE` or `LOST`; and the
        numbers that workers hold, which may be handed out again.
        """
        with tf.device(self._device):
            record = tf.compat.v1.placeholder(tf.string, [])
            fetches = locked(self._mutex, lambda: self._taken(record))
        return [record], fetches

    def _taken(self, record):
        own = tf.equal(tf.range(self._size), self._rank)
        lost, total = self._lost.read(), self._total.read()
        counted, kept = self._next.read(), self._held.read()
        is_lost = tf.reduce_any(lost & own)
        held = tf.where(own, NONE, kept)
        returned = tf.where(lost & (held >= 0) & (held < total), held, _MANY)
        is_new = tf.equal(tf.reduce_min(returned), _MANY)
        number = tf.where(is_new, counted, tf.reduce_min(returned))
        number = tf.where(number < total, number, NONE)
        held = tf.where(tf.equal(returned, number), NONE, held)
        held = tf.where(own, number, held)
        is_next = is_new & (number >= 0) & ~is_lost
        records = self._records.read()
        with tf.control_dependencies(
            [
                self._next.assign(tf.where(is_next, counted + 1, counted)),
                self._held.assign(tf.where(is_lost, kept, held)),
                self._records.assign(tf.where(own & ~is_lost, record, records)),
            ]
        ):
            unfinished = tf.where(held < total, held, NONE)
            return [tf.where(is_lost, LOST, number), unfinished]

    def end(self):
        """Makes `(feeds, fetches)` of the discovery of the data's end.

        Feeds: the number of all batches.
        """
        with tf.device(self._device):
            number = tf.compat.v1.placeholder(tf.int64, [])

            def ended():
                total = tf.minimum(self._total.read(), number)
                with tf.control_dependencies([self._total.assign(total)]):
                    return tf.identity(total)

            return [number], [locked(self._mutex, ended)]

    def leave(self):
        """Makes `(feeds, fetches)` of leaving the epoch; feeds: the record."""
        with tf.device(self._device):
            record = tf.compat.v1.placeholder(tf.string, [])

            def left():
                is_lost = self._lost.read()[self._rank]
                own = tf.equal(tf.range(self._size), self._rank) & ~is_lost
                held, records = self._held.read(), self._records.read()
                with tf.control_dependencies(
                    [
                        self._held.assign(tf.where(own, NONE, held)),
                        self._records.assign(tf.where(own, record, records)),
                    ]
                ):
                    return tf.identity(is_lost)

            return [record], [locked(self._mutex, left)]

    def leave_out(self, rank):
        """Has the number that a lost worker holds handed out again."""
        with tf.device(self._device):

            def left():
                with tf.control_dependencies([self._lost.set(rank, True)]):
                    return tf.identity(rank)

            return locked(self._mutex, left)
