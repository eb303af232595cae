"""Messages on links and at processors, and processes that share a machine.

Ranks are numbered machine by machine: links within one take no time. A message
takes the time of its link, and before and behind that the time of the
processors that send and receive it. All ranks of a collective operation send
and receive in it.
"""

import numpy as np


def machine_of(ranks, cluster):
    """The machine of each rank: an array."""
    return np.asarray(ranks, int) // cluster.processes_per_machine


def crossings(senders, receivers, cluster):
    """Messages that leave each machine, and that arrive there: two arrays.

    Args:
        senders, receivers: lists of ranks: one message of each pair.

    Example:

    >>> from keras_sparsity.planning import Cluster
    >>> sent, received = crossings([0, 1, 2], [3, 3, 3], Cluster(2, 2))
    >>> sent.tolist(), received.tolist()
    ([2, 0], [0, 2])
    """
    here = machine_of(senders, cluster)
    there = machine_of(receivers, cluster)
    is_crossing = here != there
    number = cluster.num_machines
    return (
        np.bincount(here[is_crossing], minlength=number),
        np.bincount(there[is_crossing], minlength=number),
    )


def ring_hops(ranks, cluster):
    """Hops of a ring through some ranks that leave each machine: an array.

    As many arrive there.

    Example:

    >>> from keras_sparsity.planning import Cluster
    >>> ring_hops(range(4), Cluster(2, 2)).tolist()
    [1, 1]

    References:
        EuroSys 2.2 (AllReduce in a ring).
    """
    return crossings(ranks, np.roll(ranks, -1), cluster)[0]


def shared_by(cluster, num_processes):
    """How many of some busy processes share one machine's computation.

    Example:

    >>> from keras_sparsity.planning import Cluster
    >>> shared_by(Cluster(4, 2), 3), shared_by(Cluster(4), 3)
    (2, 1)
    """
    most = cluster.processes_per_processor or cluster.processes_per_machine
    return min(most, num_processes)


def link_seconds(cluster, num_bytes, num_messages=1):
    """Time of messages that follow each other on a link.

    Args:
        cluster: `planning.Cluster`; bytes take no time if its rate is unknown.
        num_bytes: bytes of all of them.
        num_messages: their number.

    Example:

    >>> from keras_sparsity.planning import Cluster
    >>> cluster = Cluster(2, megabits_per_second=8, latency_seconds=1.0)
    >>> link_seconds(cluster, 500_000, num_messages=2)
    2.5

    References:
        LogGP (Alexandrov et al., SPAA 1995): L and G.
    """
    latency, of_byte = cluster.latency_seconds or 0, cluster.seconds_per_byte
    return num_messages * latency + num_bytes * (of_byte or 0)


def processor_seconds(cluster, num_bytes, num_messages=1):
    """Time in which a processor sends or receives messages.

    Example:

    >>> from keras_sparsity.planning import Cluster
    >>> cluster = Cluster(
    ...     2, message_seconds=1.0, message_seconds_per_byte=0.5)
    >>> processor_seconds(cluster, 3, num_messages=2)
    3.5

    References:
        LogGP (Alexandrov et al., SPAA 1995): o, here also of each byte.
    """
    of_message = cluster.message_seconds or 0
    of_byte = cluster.message_seconds_per_byte or 0
    return num_messages * of_message + num_bytes * of_byte
