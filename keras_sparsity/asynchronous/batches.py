"""Numbers of an epoch's batches, handed out to the workers by a server."""

import numpy as np
import tensorflow as tf

from keras_sparsity.asynchronous.cells import (
    Cell,
    after,
    destroyed,
    locked,
    packed,
    unpacked,
)

# More than any epoch has.
_MANY = np.int64(2**62)
# In place of a number: nothing is left to take; the others go on without you.
NONE, LOST = np.int64(-1), np.int64(-2)


class Batches:
    """Operations of a session's graph on the numbers at one server.

    A worker takes a number, and holds it until it has told that its batch has
    ended: that the gradient was pushed. It may take one more number before
    that, and so holds two at most. The numbers that a lost worker holds are
    handed out again.

    With each number that it takes, a worker leaves a record of all batches
    that it has ended; it begins with the last one's number, see `record`. That
    of a lost worker remains.

    A worker may be lost while its operations run, of which the later ones then
    do not. So a record is written first, by which its batch has ended, and all
    numbers are written at once.

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
            # The number of those that were taken, and for each worker the last
            # one but one that it has taken, and the last one.
            self._numbers = Cell(f"{name}/numbers", tf.int64, [1 + 2 * size])
            self._total = Cell(f"{name}/total", tf.int64, [])
            self._lost = Cell(f"{name}/lost", tf.bool, [size])
            self._gone = Cell(f"{name}/gone", tf.bool, [size])
            self._records = Cell(f"{name}/records", tf.string, [size])
            self.create = self._lost.fill(False)
            self.reset = tf.group(
                self._numbers.assign(packed(np.int64(0), none_of_each(size))),
                self._total.fill(_MANY),
                self._gone.fill(False),
                self._records.fill(record(NONE)),
            )
            self.records = self._records.read()
            self.lost = self._lost.read()

    def destroy(self):
        cells = self._numbers, self._total, self._lost, self._gone
        cells = *cells, self._records
        with tf.device(self._device):
            return destroyed(self._mutex, *(cell.handle for cell in cells))

    def take(self):
        """Makes `(feeds, fetches)` of taking a number.

        Feeds: the record. Fetches: the number, `NONE` or `LOST`; and the
        numbers that workers hold, which may be handed out again.
        """
        with tf.device(self._device):
            own = tf.compat.v1.placeholder(tf.string, [])
            fetches = locked(self._mutex, lambda: self._taken(own))
        return [own], fetches

    def _taken(self, own):
        total, is_lost = self._total.read(), self._lost.read()[self._rank]
        counted, held = self._held_now(own)
        is_gone = self._lost.read() | self._gone.read()
        is_left = is_gone[:, None] & (held >= 0)
        returned = tf.where(is_left, held, _MANY)
        returned = tf.where(returned < total, returned, _MANY)
        is_new = tf.equal(tf.reduce_min(returned), _MANY)
        number = tf.where(is_new, counted, tf.reduce_min(returned))
        number = tf.where(number < total, number, NONE)
        held = tf.where(tf.equal(returned, number), NONE, held)
        # At most one of its own: the one whose push is under way.
        own_held = [tf.reduce_max(held[self._rank]), number]
        held = tf.where(self._is_own()[:, None], own_held, held)
        counted += tf.cast(is_new & (number >= 0), tf.int64)
        written = self._written(own, counted, held)
        with tf.control_dependencies([written]):
            unfinished = tf.where(held < total, held, NONE)
            unfinished = tf.reshape(unfinished, [-1])
            return [tf.where(is_lost, LOST, number), unfinished]

    def _is_own(self):
        return tf.equal(tf.range(self._size), self._rank)

    def _held_now(self, own):
        """The number of numbers, and what workers hold that has not ended.

        Args:
            own: this worker's new record.
        """
        number, held = unpacked(self._numbers.read())
        records = tf.where(self._is_own(), own, self._records.read())
        ended = tf.io.decode_raw(tf.strings.substr(records, 0, 8), tf.int64)
        ended = ended[:, 0]
        # With the last one, all have ended.
        have_all = (ended >= 0) & tf.equal(held[:, 1], ended)
        has_ended = tf.equal(held, ended[:, None]) | have_all[:, None]
        return number, tf.where(has_ended, NONE, held)

    def _written(self, own, counted, held):
        """Writes the record, then the numbers; not if this worker is lost."""
        is_lost = self._lost.read()[self._rank]
        records, numbers = self._records.read(), self._numbers.read()
        records = tf.where(self._is_own() & ~is_lost, own, records)
        new = tf.where(is_lost, numbers, packed(counted, held))
        with tf.control_dependencies([new]):
            recorded = self._records.assign(records)
        with tf.control_dependencies([recorded]):
            return self._numbers.assign(new)

    def end(self):
        """Makes `(feeds, fetches)` of the discovery of the data's end.

        Feeds: the number of all batches.
        """
        with tf.device(self._device):
            number = tf.compat.v1.placeholder(tf.int64, [])

            def ended():
                total = tf.minimum(self._total.read(), number)
                return after([self._total.assign(total)], total)

            return [number], [locked(self._mutex, ended)]

    def leave(self):
        """Makes `(feeds, fetches)` of leaving the epoch; feeds: the record."""
        with tf.device(self._device):
            own = tf.compat.v1.placeholder(tf.string, [])

            def left():
                counted, held = self._held_now(own)
                written = self._written(own, counted, held)
                with tf.control_dependencies([written]):
                    gone = self._gone.set(self._rank, True)
                return after([gone], counted)

            return [own], [locked(self._mutex, left)]

    def welcome(self, rank):
        """Lets a worker that was lost take numbers again."""
        with tf.device(self._device):
            return self._lost.set(rank, False)

    def leave_out(self, rank):
        """Has the numbers that a lost worker holds handed out again."""
        with tf.device(self._device):
            return locked(
                self._mutex, lambda: after([self._lost.set(rank, True)], rank)
            )


def none_of_each(size):
    """In place of two numbers of each worker, `NONE`."""
    return tf.fill([size, 2], NONE)


def record(number, contents=b""):
    """A record, as bytes.

    Args:
        number: that of the last batch that ended; `NONE`.
        contents: bytes.
    """
    return np.int64(number).tobytes() + contents


def contents_of(record):
    """The contents of a record, as bytes; empty if none was written."""
    return record[8:]
