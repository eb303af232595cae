"""TensorFlow's own servers, one in each process, and sessions with them.

They are apart from the engine: its collectives wait for all ranks, while a
session reads and writes the servers' variables whenever its rank is ready.
"""

import contextlib
import logging
import socket
import threading
import time

import tensorflow as tf

from keras_sparsity.asynchronous.sessions import Outages
from keras_sparsity.health import errors, watch
from keras_sparsity.machines import addresses, door, firewall, ports, settings

_JOB = "keras_sparsity"
# Between two looks for a lost server's new process.
_LOOK_SECONDS = 0.02


class Servers:
    """The servers of all ranks.

    They run until their process ends: TensorFlow cannot stop them.

    Attributes:
        size, num_workers: the number of ranks, and of those that train.
        owners: the ranks whose servers hold variables: the dedicated servers,
            or all ranks.
        is_first: whether this process has the first of them.
        addresses: the host and port of each.
        outages: `Outages`.
        has_lost: whether a rank was lost, also if its new process has joined.
    """

    def __init__(self, collectives):
        self.has_lost = door.facts() is not None
        with _addresses(collectives) as self.addresses:
            self._server = _server(
                self.addresses, collectives.rank, told_of_open(collectives)
            )
        self.size, self.num_workers = collectives.size, collectives.num_workers
        has_own = bool(collectives.num_servers)
        first = collectives.num_workers if has_own else 0
        self.owners = list(range(first, self.size))
        # A session waits for all servers that it may use, also for dead ones.
        used = sorted({collectives.rank, *self.owners})
        self._filters = [f"/job:{_JOB}/task:{number}" for number in used]
        self.is_first = collectives.rank == first
        # All but the first, which has the facts by which ranks meet.
        can_return = door.is_wanted() and collectives.num_servers
        self._returning = self.owners[1:] if can_return else []
        self.outages = Outages(bool(self._returning))
        self._shared, self._lost = [], []
        self._lock = threading.Lock()
        collectives.barrier("servers/started")

    def device(self, number):
        """The name of a server's device, in the graph of a session."""
        return f"/job:{_JOB}/replica:0/task:{number}/device:CPU:0"

    def session(self, graph):
        """A session that runs a graph's operations at their servers."""
        # Not the settings of the engine, which hide other ranks' devices.
        return tf.compat.v1.Session(
            self._server.target,
            graph=graph,
            config=tf.compat.v1.ConfigProto(device_filters=self._filters),
        )

    # Lost ranks. The first owner's process tells the servers of workers.

    def add(self, shared):
        """Has `shared.leave_out(rank)` called for each worker that is lost.

        And `shared.leave_out_at(server, ranks)` of a server that has come back.
        """
        with self._lock:
            self._shared.append(shared)
            self._leave_out(self._lost, shared)

    def remove(self, shared):
        with self._lock:
            self._shared.remove(shared)

    def begin_epoch(self, store, admit):
        """Has a `Store` begin an epoch; by all ranks, while they wait.

        Args:
            admit: function that lets lost ranks take part again, which are
                alive, and returns them; called on the first owner.
        """
        with self._lock:
            if self.is_first:
                for rank in admit():
                    self._lost = [lost for lost in self._lost if lost != rank]
                    store.welcome(rank)
                store.reset()
            self._leave_out(self._lost, store)

    def change(self, rank, is_lost):
        """A rank is lost, or is a server that was lost and has come back."""
        self.has_lost = True
        if rank < self.num_workers:
            self._lose(rank)
        elif is_lost:
            self.outages.begin(rank)
        else:
            self.outages.end(rank)
            with self._lock:
                for shared in self._shared if self.is_first else []:
                    # Those that were lost while this server began.
                    shared.leave_out_at(rank, self._lost)

    def _lose(self, rank):
        """From now on a worker changes nothing at the servers."""
        with self._lock:
            self._lost.append(rank)
            for shared in self._shared:
                self._leave_out([rank], shared)

    def begin_returns(self):
        """From now on, all wait for the new process of a lost server."""
        if self.is_first and self._returning:
            watch.returning().allow(self._returning)

    def end_returns(self):
        """Waits for all servers. From now on, the loss of one ends all."""
        if self.is_first and self._returning:
            while not watch.returning().end():
                if errors.failure() is not None:
                    raise errors.CollectiveError(errors.failure())
                time.sleep(_LOOK_SECONDS)

    def _leave_out(self, ranks, shared):
        if self.is_first:
            for rank in ranks:
                shared.leave_out(rank)


@contextlib.contextmanager
def _addresses(collectives):
    facts = door.facts()
    if facts:  # at the port of the process that was lost
        yield facts["addresses"]
        return
    # TensorFlow's server is to be told a number.
    with ports.reserved(1) as (port,):
        yield collectives.gather_objects(
            (own_host(collectives.machines), port), "servers/addresses"
        )


def _server(given, rank, warn):
    cluster = tf.train.ClusterSpec({_JOB: [f"{h}:{p}" for h, p in given]})
    hosts = [host.strip("[]") for host, _ in given]
    with firewall.guarded_port(given[rank][1], hosts, warn):
        return tf.distribute.Server(cluster, job_name=_JOB, task_index=rank)


def told_of_open(collectives):
    """A function of the message that this process's server is open to all.

    Once for each machine. The native engine has said it of its own server.
    """
    is_told = collectives.engine == "native" and collectives.size > 1
    if is_told or collectives.local_rank:
        return logging.getLogger(__name__).info
    return logging.getLogger(__name__).warning


_started = {}  # from `Collectives` to `Servers`


def started(collectives):
    """The `Servers` of the ranks, started once."""
    if collectives not in _started:
        _started[collectives] = Servers(collectives)
    return _started[collectives]


def share(collectives, servers):
    """Has `started` return these `Servers` for other `Collectives`, too."""
    _started[collectives] = servers


def own_host(machines):
    """The name or address at which other ranks reach this process."""
    if len(set(machines)) == 1:
        return "127.0.0.1"
    tasks = settings.cluster()
    if tasks:
        *_, address = tasks[settings.cluster_rank(tasks)]
        return address.rpartition(":")[0]
    return [*addresses.towards_launcher(), socket.gethostname()][0]
