"""Who takes part in a training: kept by one process, for all.

That is the scheduler if there is one, see `scheduler.py`; else the first of the
ranks that have variables.
"""

import contextlib
import threading

import numpy as np
import tensorflow as tf

from keras_sparsity._tf.tf_sessions import function_of
from keras_sparsity.asynchronous.batches import Batches
from keras_sparsity.asynchronous.cells import Cell, after, locked, tokens
from keras_sparsity.asynchronous.clocks import Clocks
from keras_sparsity.asynchronous.server_state import ServerState
from keras_sparsity.asynchronous.sessions import LastingSession
from keras_sparsity.health.returning import Returning

NONE = -1
# The process that keeps the facts has no part of its own in them.
_NOBODY = 0


class Registry:
    """Leaves lost ranks out, and lets their new processes take part again.

    The first rank with variables makes all calls, but `change`, in the order
    of a training.

    Args:
        cluster: `Cluster`.

    Attributes:
        returning: `Returning`, for the watch.
    """

    def __init__(self, cluster):
        self._cluster, self.returning = cluster, Returning()
        self._meeting = None
        self._stores, self._lost = {}, []  # from a name to `Members`
        self._lock = threading.Lock()

    def begin_meeting(self):
        """Begins the messages of the ranks, see `Letters`."""
        with self._lock:
            self._meeting = Attendance(self._cluster)
            self._meeting.begin()
            self._leave_out(self._lost, self._meeting)

    def add(self, name, numbers, bound):
        """Begins a `Store`, before all ranks use it."""
        with self._lock:
            store = Members(self._cluster, name, numbers, bound)
            store.begin()
            self._stores[name] = store
            self._leave_out(self._lost, store)

    def remove(self, name):
        with self._lock:
            self._stores.pop(name).close()

    def begin_epoch(self, name, fit, epoch):
        """Begins an epoch of a `Store`, while all ranks wait.

        Args:
            fit: the number of the `fit` that runs.
            epoch: the epoch that begins; None for the first one, which no lost
                rank's new process joins.
        """
        with self._lock:
            store = self._stores[name]
            if self._meeting is not None:
                for rank in self._meeting.admit(fit, epoch):
                    self._lost = [lost for lost in self._lost if lost != rank]
                    store.welcome(rank)
            store.reset()
            self._leave_out(self._lost, store)

    def begin_returns(self):
        """From now on, all wait for the new process of a lost server."""
        self.returning.allow(self._cluster.owners)

    def end_returns(self):
        """From now on, the loss of a server ends all; False if one is lost."""
        return self.returning.end()

    def change(self, rank, is_lost):
        """A rank is lost, or is a server that was lost and has come back."""
        if rank < self._cluster.num_workers:
            with self._lock:
                self._lost.append(rank)
                for each in self._all():
                    self._leave_out([rank], each)
        elif not is_lost:
            with self._lock:
                for store in self._stores.values():
                    # Those that were lost while this server began.
                    store.leave_out_at(rank, self._lost)

    def _all(self):
        return [*filter(None, [self._meeting]), *self._stores.values()]

    def _leave_out(self, ranks, each):
        for rank in ranks:
            each.leave_out(rank)


class Members:
    """The workers of a `Store`, as its servers know them.

    Args:
        cluster: `Cluster`.
        name, bound: those of the `Store`.
        numbers: the servers that it has variables at.
    """

    def __init__(self, cluster, name, numbers, bound):
        graph, size = tf.Graph(), cluster.num_workers
        self._session = LastingSession(cluster, graph)
        with graph.as_default():
            device = cluster.device(cluster.scheduler)
            self._clocks = Clocks(
                device, size, _NOBODY, bound, f"{name}/clocks"
            )
            self._batches = Batches(device, size, _NOBODY, f"{name}/batches")
            self._servers = {
                number: ServerState(
                    cluster.device(number), size, _NOBODY, name, None
                )
                for number in numbers
            }
            self._make_calls()

    def _make_calls(self):
        rank = tf.compat.v1.placeholder(tf.int64, [])
        batches, servers = self._batches, self._servers.values()
        call = self._session.function_of
        created = [batches.create, *(server.create for server in servers)]
        self._create = call([], [], created)
        begun = [self._clocks.reset, batches.reset]
        begun += [server.reset for server in servers]
        self.reset = call([], [], begun)
        welcomed = [batches.welcome(rank)]
        welcomed += [server.welcome(rank) for server in servers]
        self.welcome = call([rank], [], welcomed)
        left = [batches.leave_out(rank), self._clocks.finish(rank)]
        self._hand_out = call([rank], left)
        self._leave_out_at = {
            number: call([rank], [server.leave_out(rank)])
            for number, server in self._servers.items()
        }

    def begin(self):
        self._create()
        self.reset()

    def leave_out(self, rank):
        """From now on, nothing that a worker pushes is applied.

        Its batches are handed out again, and nobody waits for it.
        """
        for number in self._servers:
            self.leave_out_at(number, [rank])
        self._hand_out(rank, waits=False)

    def leave_out_at(self, number, ranks):
        """At one server; if it is lost, its new process is told later."""
        with contextlib.suppress(tf.errors.OpError):
            for rank in ranks if number in self._servers else []:
                self._leave_out_at[number](rank, waits=False)

    def close(self):
        self._session.close()


class Attendance:
    """Which ranks write letters, see `Letters`: cells, and calls on them."""

    def __init__(self, cluster):
        self._first = cluster.owners[0]
        graph = tf.Graph()
        session = cluster.session(graph)
        with graph.as_default():
            self.cells = MeetingCells(cluster)
            self._make_calls(session)

    def _make_calls(self, session):
        cells = self.cells
        self.begin = function_of(session, [], [], cells.begun())
        rank, fit, epoch, count = (
            tf.compat.v1.placeholder(tf.int64, []) for _ in range(4)
        )

        def left():
            told = [cells.lost.set(rank, True), cells.asks.set(rank, NONE)]
            return cells.rung_after(told, rank)

        def admitted():
            told = [
                cells.lost.set(rank, False),
                cells.asks.set(rank, NONE),
                cells.numbers.set(rank, count),
                cells.epochs.set(rank, epoch),
            ]
            return after(told, rank)

        def call(feeds, build):
            with tf.device(cells.device):
                return function_of(session, feeds, [locked(cells.mutex, build)])

        self.leave_out = call([rank], left)
        self._admit = call([rank, count, epoch], admitted)
        self._read_asks = call([], lambda: cells.asks.read())
        self._read_numbers = call([], lambda: cells.numbers.read())
        with tf.device(cells.device):
            told = cells.fit.assign(fit)
        self._tell = function_of(session, [fit], [], [told])

    def admit(self, fit, epoch):
        """Lets ranks join, and returns their numbers.

        While all wait for the letter of the first rank with variables.
        """
        if epoch is None:
            self._tell(fit)
            return []
        (asks,) = self._read_asks()
        (numbers,) = self._read_numbers()
        ranks = np.flatnonzero(asks == fit).tolist()
        for rank in ranks:
            # Some still wait for all letters of this number, now for its, too.
            self._admit(rank, numbers[self._first] - 1, epoch)
        return ranks


class MeetingCells:
    """Facts about the ranks' letters, in the graph of a session."""

    def __init__(self, cluster):
        ranks = range(cluster.size)
        self.device = cluster.device(cluster.scheduler)
        with tf.device(self.device):
            self.mutex = tf.raw_ops.MutexV2(shared_name="meeting/mutex")
            self.numbers = Cell("meeting/numbers", tf.int64, [cluster.size])
            self.lost = Cell("meeting/lost", tf.bool, [cluster.size])
            self.fit = Cell("meeting/fit", tf.int64, [])  # that runs
            # The `fit` that a rank waits to join, and the epoch in which it
            # may.
            self.asks = Cell("meeting/asks", tf.int64, [cluster.size])
            self.epochs = Cell("meeting/epochs", tf.int64, [cluster.size])
            self.letters = [
                [Cell(f"meeting/{r}/{i}", tf.string, []) for i in range(2)]
                for r in ranks
            ]
            self.bells = [tokens(f"meeting/{rank}/bell") for rank in ranks]

    def begun(self):
        with tf.device(self.device):
            letters = [cell.fill("") for cell in sum(self.letters, [])]
            asks = [self.asks.fill(NONE), self.epochs.fill(NONE)]
            numbers, fit = self.numbers.fill(0), self.fit.fill(NONE)
            return [self.lost.fill(False), numbers, fit, *asks, *letters]

    def rung_after(self, operations, value):
        """A value that is there once operations have ended, and all look."""
        one = tf.zeros([], tf.int64)
        with tf.control_dependencies(operations):
            rung = [bell.enqueue(one) for bell in self.bells]
        return after(rung, value)
