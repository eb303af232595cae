"""The cost of each place where a head may end and a tail begin."""

import dataclasses

import numpy as np

from keras_sparsity._tf import checks
from keras_sparsity.planning.specs import Cluster
from keras_sparsity.stages.machine_links import (
    crossings,
    machine_of,
    ring_hops,
    shared_by,
)


@dataclasses.dataclass(frozen=True)
class SplitCost:
    """A step of a model that is divided at one place.

    Attributes:
        place: the place of the head's last call; None of data parallelism.
        head_bytes: bytes of the head's parameters.
        sent_bytes: bytes of the activations of one worker.
        busiest_bytes: bytes on the busiest link, in one direction.
        star_bytes: those if the head's gradients went to a server at the
            tail's worker, as in the paper; None of data parallelism.
        seconds: the predicted time.
        link_seconds: the part of it in which messages travel.
        row_bytes: bytes of the rows of sharded tables that a worker pulls from
            their owners, of their gradients and numbers.
    """

    place: int | None
    head_bytes: int
    sent_bytes: float
    busiest_bytes: float
    star_bytes: float | None
    seconds: float
    link_seconds: float = 0.0
    row_bytes: float = 0.0


def split_costs(
    profile,
    num_workers,
    num_tails,
    num_examples,
    cluster=None,
    is_star=False,
):
    r"""Costs of data parallelism, and of each possible split.

    With W workers and M tail workers, P and T bytes of parameters in head and
    tail, and O bytes of a worker's activations, the links of a tail worker and
    of a worker carry, in each direction,

    .. math:: W O / M + 2 T (M-1)/M, \quad O + 2 P (W-1)/W

    The rows that a worker looks up in tables of the head, R bytes, are
    gathered: R (W-1) more. Of those in sharded tables E bytes travel, with
    their gradients and numbers: E (W-1)/W more. Of several processes on a
    machine, the messages between machines count. Passes, activations, their
    gradients, the sums of gradients and updates follow each other, so their
    times add up. Without a flush there is nothing to overlap with.

    Args:
        profile: `Profile`.
        num_workers: W.
        num_tails: M; 0 if one process is alone.
        num_examples: the number of examples of a batch.
        cluster: `planning.Cluster`; by default a machine for each process.
        is_star: whether the head's gradients are summed at the tail workers,
            which send back the sums; else by AllReduce. Then P, of dense
            gradients, travels as O does, and several tail workers sum it by
            AllReduce.

    Returns:
        List of `SplitCost`; the first is that of data parallelism over W + M
        processes.

    Raises:
        ValueError: if W or the number of examples is not positive.

    Example:

    >>> from keras_sparsity.stages.layer_placement import LayerSize
    >>> from keras_sparsity.stages.profile import GradientSize, Profile
    >>> sizes = (LayerSize("dense", 10, 5), LayerSize("dense", 1000, 1))
    >>> gradients = (GradientSize(40), GradientSize(4000))
    >>> profile = Profile(
    ...     ("a", "b"), sizes, (1.0, 1.0), 8, {0: 20}, 0.01, gradients)
    >>> whole, split = split_costs(profile, 2, 1, num_examples=8)
    >>> round(whole.busiest_bytes), split.busiest_bytes
    (5387, 160.0)
    >>> round(whole.seconds, 2), split.seconds
    (54.53, 5.1)

    References:
        RALP (Park et al.), the profiler and table 2.
    """
    checks.positive_integer("num_workers", num_workers)
    checks.positive_integer("num_examples", num_examples)
    size = num_workers + num_tails
    cluster = cluster or Cluster(size)
    whole, head, tail = (
        _Group(profile, cluster, range(*bounds), num_examples)
        for bounds in ((size,), (num_workers,), (num_workers, size))
    )
    calls = slice(None)
    busiest = whole.ring_bytes(calls) * profile.wire_share
    busiest = float((busiest + whole.owned_bytes(calls)).max())
    travels = whole.latency_seconds + whole.message_seconds(
        busiest, whole.num_exchanges(calls)
    )
    of_whole = SplitCost(
        None,
        whole.parameter_bytes(calls),
        0,
        busiest,
        None,
        whole.seconds(calls) + travels,
        travels,
        whole.row_bytes(calls),
    )
    fan = _fan(num_workers, num_tails, cluster)
    of_splits = [
        _of_split(
            place,
            crossing * num_examples / num_workers,
            head,
            tail,
            fan,
            is_star and num_workers > 1,
        )
        for place, crossing in profile.crossing_bytes.items()
    ]
    return [of_whole, *of_splits]


def _of_split(place, sent, head, tail, fan, is_star):
    """The `SplitCost` of a place.

    Args:
        place: the place of the head's last call.
        sent: bytes of the activations of one worker.
        head, tail: `_Group`s.
        fan: as `_fan` returns it.
        is_star: as for `split_costs`.
    """
    out, into = fan
    front, back = slice(place + 1), slice(place + 1, None)
    sums = tail.ring_bytes(back) + head.owned_bytes(front)
    # Activations one way, and as many gradients the other way.
    to_tail, num_messages = sent, 2 * bool(sent)
    dense = head.dense_bytes(front)
    if is_star:
        to_tail, num_messages = sent + dense, num_messages + 2
        sums = sums + head.gathered_bytes(front) + tail.sum_bytes(dense)
    else:
        sums = sums + head.ring_bytes(front)
    both_ways = to_tail * (out + into)
    one_way = to_tail * float(np.maximum(out, into).max())
    travels = max(head.latency_seconds, tail.latency_seconds)
    travels += head.message_seconds(2 * one_way, num_messages)
    travels += head.message_seconds(
        float(sums.max()), head.num_exchanges(front)
    )
    star = len(head.ranks) * (sent + head.summed_bytes(front))
    # A process alone makes all passes.
    last = tail if len(tail.ranks) else head
    return SplitCost(
        place,
        head.parameter_bytes(front),
        sent,
        float((both_ways + sums).max()),
        star if len(tail.ranks) else 0,
        head.seconds(front) + last.seconds(back) + travels,
        travels,
        head.row_bytes(front),
    )


class _Group:
    """Ranks that train the same calls, each on its part of a batch.

    Args:
        profile, cluster: as for `split_costs`.
        ranks: a range.
        num_examples: the number of examples of a batch.
    """

    def __init__(self, profile, cluster, ranks, num_examples):
        self._profile, self._cluster = profile, cluster
        self.ranks = ranks
        self._hops = ring_hops(ranks, cluster)
        self._size = max(1, len(ranks))
        self._examples = num_examples / self._size

    def parameter_bytes(self, calls):
        return sum(each.parameter_bytes for each in self._gradients(calls))

    def ring_bytes(self, calls):
        """Bytes that each machine sends to sum the gradients: an array."""
        dense = self.sum_bytes(self.dense_bytes(calls))
        return dense + self.gathered_bytes(calls)

    def sum_bytes(self, dense):
        """Those of which the ranks sum so many bytes by AllReduce."""
        return self._hops * (2 * dense * (self._size - 1) / self._size)

    def gathered_bytes(self, calls):
        """Those of rows, which all ranks get."""
        rows = sum(
            each.row_bytes(self._examples) for each in self._gradients(calls)
        )
        return self._hops * (rows * (self._size - 1))

    def dense_bytes(self, calls):
        return sum(each.dense_bytes for each in self._gradients(calls))

    def summed_bytes(self, calls):
        return sum(each.summed_bytes for each in self._gradients(calls))

    def row_bytes(self, calls):
        """Bytes of the rows that each rank pulls and pushes."""
        return sum(
            each.owned_bytes(self._examples) for each in self._gradients(calls)
        )

    def owned_bytes(self, calls):
        """Bytes of these that leave each machine: an array."""
        here = np.bincount(
            machine_of(self.ranks, self._cluster),
            minlength=self._cluster.num_machines,
        )
        # As many arrive there.
        elsewhere = (len(self.ranks) - here) / self._size
        return here * elsewhere * self.row_bytes(calls)

    def num_exchanges(self, calls):
        """Messages after each other: numbers, rows and gradients of rows."""
        is_of_rows = self._hops.any() and self.row_bytes(calls)
        return 3 if is_of_rows else 0

    def message_seconds(self, num_bytes, num_messages=0):
        """Time of bytes on a link, and of the latency of messages."""
        latency = num_messages * (self._cluster.latency_seconds or 0)
        return latency + num_bytes * self._profile.seconds_per_byte

    @property
    def latency_seconds(self):
        """Time of a sum of gradients that have no bytes."""
        hops = 2 * (self._size - 1) if self._hops.any() else 0
        return hops * (self._cluster.latency_seconds or 0)

    def seconds(self, calls):
        """Time of the passes and the update."""
        profile = self._profile
        share = profile.time_share(self._examples)
        seconds = share * sum(profile.seconds[calls])
        seconds += sum(profile.update_seconds[calls])
        busy = shared_by(self._cluster, self._size)
        return seconds * busy / self._cluster.relative_speed

    def _gradients(self, calls):
        return self._profile.gradients[calls]


def _fan(num_workers, num_tails, cluster):
    """Arrays: the workers' messages that leave, and that reach, a machine."""
    if not num_tails:
        return crossings([], [], cluster)
    # The first worker that each tail has no longer.
    ends = [i * num_workers // num_tails for i in range(1, num_tails + 1)]
    workers = np.arange(num_workers)
    tails = num_workers + np.searchsorted(ends, workers, side="right")
    return crossings(workers, tails, cluster)


def fastest(costs):
    """The place of the least predicted time; None: data parallelism.

    Args:
        costs: list, as `split_costs` returns it.

    Returns:
        A place or None.

    Raises:
        ValueError: if the list is empty.

    Example:

    >>> fastest([SplitCost(None, 8, 0, 8, None, 0.2),
    ...          SplitCost(3, 4, 1, 2, 5, 0.1)])
    3

    References:
        None: a rule of this library, in place of RALP's.
    """
    return min(costs, key=lambda cost: cost.seconds).place
