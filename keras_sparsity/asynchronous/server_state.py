"""Reads and updates of the variables at one server."""

import tensorflow as tf

from keras_sparsity._tf.tf_sessions import as_function
from keras_sparsity.asynchronous.batches import LOST
from keras_sparsity.asynchronous.cells import Cell, after, destroyed, locked


class ServerState:
    """Operations of a session's graph on one server's variables.

    They hold the server's mutex. It has the count of the updates that it has
    applied, whose pushes are not applied any more, and of which batches each
    worker's last two were: all that are handed out again if it is lost, see
    `Batches`. A server's new process begins with a count that has the batches
    whose steps have ended in the epoch. The push of such a batch may come
    again: its answer, or its worker, was lost with the process before.

    Args:
        device, size, rank, name: as for `Batches`.
        update: function of a list of `(Piece, row numbers or None, gradient,
            ...)`, the count, the version of the pull and the learning rate
            that makes the operations of an update.
    """

    def __init__(self, device, size, rank, name, update):
        self.device, self._rank, self._update = device, rank, update
        with tf.device(device):
            self._mutex = tf.raw_ops.MutexV2(shared_name=f"{name}/mutex")
            self._count = Cell(f"{name}/count", tf.int64, [])
            self._lost = Cell(f"{name}/lost", tf.bool, [size])
            self._last = Cell(f"{name}/last", tf.int64, [size, 2])
            # Batches that the count began with, and that may come again.
            self._counted = Cell(f"{name}/counted", tf.int64, [size, 2])
            self.create = self._lost.fill(False)
            forgotten = self._last, self._counted
            self.reset = tf.group(*(cell.fill(-1) for cell in forgotten))
            self.version = self._count.read()

    def set_count(self, value):
        with tf.device(self.device):
            return self._count.assign(value)

    def take_place(self, begun, ended, last, lost):
        """In a new process: takes what others know of the epoch.

        No push is known.

        Args:
            begun: the count before the epoch.
            ended: of how many batches the step has ended.
            last: of each worker the last two of them.
            lost: whether each worker is lost.
        """
        with tf.device(self.device):
            known = [self._count.assign(begun + ended), self._lost.assign(lost)]
            return [*known, self._last.fill(-1), self._counted.assign(last)]

    def leave_out(self, rank):
        """From now on, applies nothing that a worker pushes."""
        with tf.device(self.device):
            here = tf.identity(rank)
            with tf.control_dependencies([here]):
                return locked(
                    self._mutex,
                    lambda: after([self._lost.set(here, True)], here),
                )

    def welcome(self, rank):
        with tf.device(self.device):
            return self._lost.set(rank, False)

    def destroy(self):
        cells = self._count, self._lost, self._last, self._counted
        with tf.device(self.device):
            return destroyed(self._mutex, *(cell.handle for cell in cells))

    def read(self, parts):
        """The count and the values of `(Piece, row numbers or None)`."""

        def read():
            values = [piece.cell.read(ids) for piece, ids in parts]
            return [self._count.read(), *values]

        with tf.device(self.device):
            return locked(self._mutex, read)

    def push(self, gradients):
        """Makes `(feeds, count before)` of an update.

        Feeds: the batch's number and the version of the pull, both in one; and
        the learning rate. The count is `LOST` if the update is left out as a
        lost worker's.
        """
        with tf.device(self.device):
            numbers = tf.compat.v1.placeholder(tf.int64, [2])
            rate = tf.compat.v1.placeholder(tf.float32, [])
            told = *tf.unstack(numbers), rate
            count = locked(
                self._mutex, lambda: self._applied_once(gradients, *told)
            )
            return [numbers, rate], count

    def _applied_once(self, gradients, batch, version, rate):
        """Updates the variables; returns the count before.

        Not if this worker is lost, or another one has pushed the same batch
        and was lost then.
        """
        is_lost, before = self._lost.read()[self._rank], self._last.read()
        is_due = ~is_lost & tf.reduce_all(tf.not_equal(before, batch))

        def apply():
            count = self._count.read()
            assigned = self._update(gradients, count, version, rate)
            known = self._counted.read()
            is_new = tf.reduce_all(tf.not_equal(known, batch))
            with tf.control_dependencies(assigned):
                counted = self._count.assign(count + tf.cast(is_new, tf.int64))
            with tf.control_dependencies([counted]):
                last = tf.stack([before[self._rank, 1], batch])
                noted = self._last.set(self._rank, last)
            return after([noted], count)

        # If this worker, or another server, is lost meanwhile, TensorFlow
        # begins no function any more, and ends those that it has begun: all of
        # it, or nothing.
        return as_function(
            tf.cond(
                is_due,
                apply,
                lambda: tf.where(is_lost, LOST, self._count.read()),
            )
        )
