"""Messages that cross the links of machines, and processes that share one.

Ranks are numbered machine by machine: messages within one are free.
"""

import numpy as np


def machine_of(ranks, cluster):
    """The machine of each rank: an array."""
    return np.asarray(ranks, int) // cluster.processes_per_machine


def crossings(senders, receivers, cluster):
    """Messages that leave each machine, and that arrive there.

    Args:
        senders, receivers: lists of ranks: one message of each pair.
        cluster: `planning.Cluster`.

    Returns:
        `(array, array)` of a number for each machine.

    Raises:
        Nothing.

    Example:

    >>> from keras_sparsity.planning import Cluster
    >>> sent, received = crossings([0, 1, 2], [3, 3, 3], Cluster(2, 2))
    >>> sent.tolist(), received.tolist()
    ([2, 0], [0, 2])

    References:
        None: a count.
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

    Args:
        ranks: list, in the ring's order.
        cluster: `planning.Cluster`.

    Returns:
        Array of a number for each machine.

    Raises:
        Nothing.

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

    Args:
        cluster: `planning.Cluster`.
        num_processes: their number.

    Returns:
        A number.

    Raises:
        Nothing.

    Example:

    >>> from keras_sparsity.planning import Cluster
    >>> shared_by(Cluster(4, 2), 3), shared_by(Cluster(4), 3)
    (2, 1)

    References:
        None: a count.
    """
    most = cluster.processes_per_processor or cluster.processes_per_machine
    return min(most, num_processes)
