"""TensorFlow's own servers, one in each process, and sessions with them.

They are apart from the engine: its collectives wait for all ranks, while a
session reads and writes the servers' variables whenever its rank is ready.
"""

import functools
import os
import socket

import tensorflow as tf

from keras_sparsity.machines import addresses, firewall, settings

_JOB = "keras_sparsity"


class Servers:
    """The servers of all ranks.

    They run until their process ends: TensorFlow cannot stop them.

    Args:
        collectives: `Collectives` of all ranks.
    """

    def __init__(self, collectives):
        # Free, and taken next: TensorFlow's server is to be told a number.
        with socket.create_server(("", 0)) as probe:
            port = probe.getsockname()[1]
        given = collectives.gather_objects(
            (own_host(collectives.machines), port), "servers/addresses"
        )
        cluster = tf.train.ClusterSpec({_JOB: [f"{h}:{p}" for h, p in given]})
        hosts = [host.strip("[]") for host, _ in given]
        with firewall.guarded_port(port, hosts, lambda message: None):
            self._server = tf.distribute.Server(
                cluster, job_name=_JOB, task_index=collectives.rank
            )
        self.size = collectives.size
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
            config=tf.compat.v1.ConfigProto(),
        )


@functools.cache
def started(collectives):
    """The `Servers` of the ranks, started once."""
    return Servers(collectives)


def own_host(machines):
    """The name or address at which other ranks reach this process.

    Args:
        machines: the number of each rank's machine.
    """
    if len(set(machines)) == 1:
        return "127.0.0.1"
    tasks = settings.cluster()
    if tasks:
        *_, address = tasks[settings.cluster_rank(tasks)]
        return address.rpartition(":")[0]
    root = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    return addresses.towards(root) or "127.0.0.1"
