"""Small messages among ranks, of which some may be lost."""

import pickle
import time

import numpy as np
import tensorflow as tf

from keras_sparsity._tf.tf_sessions import function_of
from keras_sparsity.asynchronous.cells import after, locked
from keras_sparsity.asynchronous.interruptible import Interruptible
from keras_sparsity.asynchronous.registry import NONE, MeetingCells
from keras_sparsity.health import watch

# Between two looks of a process that waits to join.
_LOOK_SECONDS = 0.02


class Letters:
    """Small messages among the ranks that are not lost.

    A rank writes its letter, and waits until each other rank has written its
    own, or is lost. It needs two places for letters: a rank writes its second
    next one when all have written the next, and so have read this one. While it
    waits it sleeps, until a letter, or a loss, rings its bell.

    A new process of a lost rank is alone at first: it has its own letters. It
    waits to be admitted, which happens at the beginning of an epoch, and the
    others wait for its next letter from then on. That of a server takes the
    earlier one's place within an epoch.

    Args:
        servers: `Servers`.
        rank: this process's.
    """

    def __init__(self, servers, rank):
        self.rank, self._servers, self._count = rank, servers, 0
        cluster = servers.cluster
        self._first = cluster.owners[0]
        graph = tf.Graph()
        session = cluster.session(graph)
        with graph.as_default():
            self._cells = MeetingCells(cluster)
            with tf.device(self._cells.device):
                self._make_calls(session)
                self._make_joining(session)

    @property
    def is_alone(self):
        return self._servers.is_alone

    def _make_calls(self, session):
        cells = self._cells
        number = tf.compat.v1.placeholder(tf.int64, [])
        letter = tf.compat.v1.placeholder(tf.string, [])
        self._put, self._take = [], []
        for place in range(2):
            written = self._written(place, letter, number)
            self._put.append(function_of(session, [number, letter], [written]))
            read = [letters[place].read() for letters in cells.letters]
            self._take.append(function_of(session, [], read))
        seen = locked(
            cells.mutex, lambda: [cells.numbers.read(), cells.lost.read()]
        )
        self._look = function_of(session, [], seen)
        bell = cells.bells[self.rank]
        self._sleep = Interruptible(function_of(session, [], [bell.dequeue()]))

    def _written(self, place, letter, number):
        cells = self._cells

        def written():
            is_lost = cells.lost.read()[self.rank]
            before = cells.numbers.read()[self.rank]
            # The others may have gone on without it.
            kept = tf.where(is_lost, before, number)
            # In this order: this rank may be lost meanwhile.
            with tf.control_dependencies(
                [cells.letters[self.rank][place].assign(letter)]
            ):
                told = cells.numbers.set(self.rank, kept)
            # Rung before this rank looks.
            bell = cells.bells[self.rank]
            put = [told, bell.dequeue_many(bell.size())]
            return cells.rung_after(put, is_lost)

        return locked(cells.mutex, written)

    def _make_joining(self, session):
        cells, fit = self._cells, tf.compat.v1.placeholder(tf.int64, [])

        def asked():
            none = cells.epochs.set(self.rank, NONE)
            return after([none, cells.asks.set(self.rank, fit)], fit)

        asking = [locked(cells.mutex, asked)]
        self._ask = function_of(session, [fit], asking)
        read = cells.epochs, cells.numbers, cells.fit
        seen = locked(cells.mutex, lambda: [cell.read() for cell in read])
        self._see = function_of(session, [], seen)

    def wait(self, fit):
        """The epoch in which this process may join a `fit`, once it may.

        None if the others run a later one.
        """
        self._ask(fit)
        while True:
            epochs, numbers, running = self._see()
            if epochs[self.rank] != NONE:
                self._joins_at = numbers[self.rank]
                return int(epochs[self.rank])
            if running > fit:
                return None
            time.sleep(_LOOK_SECONDS)

    def join(self):
        """Takes part from now on."""
        self._count, self._servers.is_alone = int(self._joins_at), False
        watch.joined()

    def runs(self, fit):
        """Whether the others run a `fit`."""
        return self._see()[-1] == fit

    def take_place(self):
        """Takes part from now on, as a server; while the first one waits.

        That has not put the letter at the end of the epoch; the server that was
        lost may have. If it is the first one, that had not.
        """
        _, numbers, _ = self._see()
        self._joins_at = numbers[self._first]
        self.join()

    def gather(self, name, value):
        """dict from a rank to its value, of all that are not lost."""
        if self.is_alone:
            return {self.rank: value}
        self._count += 1
        place = self._count % 2
        (is_lost,) = self._put[place](self._count, pickle.dumps((name, value)))
        if is_lost:
            raise_of_lost(self.rank)
        while True:
            numbers, lost = self._look()
            is_there = numbers >= self._count
            if (is_there | lost).all():
                break
            self._sleep()
        letters = self._take[place]()
        found = {
            rank: pickle.loads(letters[rank])
            for rank in np.flatnonzero(is_there).tolist()
        }
        names = {rank: name for rank, (name, _) in found.items()}
        if set(names.values()) != {name}:
            raise ValueError(
                f"All ranks must make the same calls. Received: {names}. "
                "Remove calls that one rank makes alone (`if rank == 0:`)."
            )
        return {rank: value for rank, (_, value) in found.items()}


def raise_of_lost(rank):
    """Raises RuntimeError on a worker that the others take for lost."""
    raise RuntimeError(
        f"The others go on without rank {rank}, which was not heard of for "
        "longer than the timeout (KERAS_SPARSITY_TIMEOUT). Its batch was "
        "given to another worker."
    )
