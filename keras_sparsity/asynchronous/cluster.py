"""TensorFlow's own servers, one in each process, and sessions with them.

They are apart from the engine: its collectives wait for all ranks, while a
session reads and writes the servers' variables whenever its rank is ready.
"""

import logging
import socket

import tensorflow as tf

from keras_sparsity.asynchronous.sessions import Outages
from keras_sparsity.machines import addresses, firewall, settings

_JOB = "keras_sparsity"


class Cluster:
    """The servers of all ranks, and of the scheduler if there is one.

    They run until their process ends: TensorFlow cannot stop them.

    Args:
        addresses: the host and port of each rank, and of the scheduler.
        number: this process's: its rank, or behind them the scheduler's.
        num_workers, num_servers: of ranks.
        returns: whether a new process may take a lost server's place.
        warn: function of the message that this server is open to all.

    Attributes:
        owners: the ranks whose servers hold variables: the dedicated servers,
            or all ranks.
        scheduler: the number of the process that has the messages, clocks and
            numbers of batches: the scheduler, or the first owner.
        returns: the argument.
        outages: `Outages`.
    """

    def __init__(
        self, addresses, number, num_workers, num_servers, returns, warn
    ):
        self.addresses, self.num_workers = addresses, num_workers
        self.size = num_workers + num_servers
        first = num_workers if num_servers else 0
        self.owners = list(range(first, self.size))
        has_own = len(addresses) > self.size
        self.scheduler = self.size if has_own else first
        # A session waits for all servers that it may use, also for dead ones.
        used = sorted({number, self.scheduler, *self.owners})
        self._filters = [f"/job:{_JOB}/task:{each}" for each in used]
        self.returns, self.outages = returns, Outages(returns)
        self._server = _server(addresses, number, warn)

    def device(self, number):
        """The name of a server's device, in the graph of a session."""
        return f"/job:{_JOB}/replica:0/task:{number}/device:CPU:0"

    def change(self, rank, is_lost):
        """A rank is lost, or is a server that was lost and has come back."""
        if rank >= self.num_workers:
            self.outages.change(rank, is_lost)

    def session(self, graph):
        """A session that runs a graph's operations at their servers."""
        # Not the settings of the engine, which hide other ranks' devices.
        return tf.compat.v1.Session(
            self._server.target,
            graph=graph,
            config=tf.compat.v1.ConfigProto(device_filters=self._filters),
        )


def _server(given, number, warn):
    cluster = tf.train.ClusterSpec({_JOB: [f"{h}:{p}" for h, p in given]})
    hosts = [host.strip("[]") for host, _ in given]
    with firewall.guarded_port(given[number][1], hosts, warn):
        return tf.distribute.Server(cluster, job_name=_JOB, task_index=number)


def told_of_open(collectives):
    """A function of the message that this process's server is open to all.

    Once for each machine. The native engine has said it of its own server.
    """
    is_told = collectives.engine == "native" and collectives.size > 1
    if is_told or collectives.local_rank:
        return logging.getLogger(__name__).info
    return logging.getLogger(__name__).warning


def own_host(machines):
    """The name or address at which other ranks reach this process."""
    if len(set(machines)) == 1:
        return "127.0.0.1"
    tasks = settings.cluster()
    if tasks:
        *_, address = tasks[settings.cluster_rank(tasks)]
        return address.rpartition(":")[0]
    return [*addresses.towards_launcher(), socket.gethostname()][0]
