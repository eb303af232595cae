"""The cost of each place where a head may end and a tail begin."""

import dataclasses

import numpy as np

from keras_sparsity._tf import checks
from keras_sparsity.planning.specs import Cluster
from keras_sparsity.stages.column_split import chosen_calls
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
        tail_split: what several tail workers divide, "batch" or "columns".
    """

    place: int | None
    head_bytes: int
    sent_bytes: float
    busiest_bytes: float
    star_bytes: float | None
    seconds: float
    link_seconds: float = 0.0
    row_bytes: float = 0.0
    tail_split: str = "batch"


def split_costs(
    profile,
    num_workers,
    num_tails,
    num_examples,
    cluster=None,
    is_star=False,
    tail_split=None,
):
    r"""Costs of data parallelism, and of each possible split.

    With W workers and M tail workers, P and T bytes of parameters in head and
    tail, and O bytes of a worker's activations, the links of a tail worker and
    of a worker carry, in each direction,

    .. math:: W O / M + 2 T (M-1)/M, \quad O + 2 P (W-1)/W

    If the tail workers divide the columns of wide layers, of K bytes, each has
    the whole batch. Of such a layer, which makes Y bytes of X bytes of a batch,
    outputs are gathered and gradients of inputs summed:

    .. math:: W O / M + (W O + Y + 2 X + 2 (T - K)) (M-1)/M

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
        tail_split: what several tail workers divide: `"batch"`, `"columns"`,
            or None: of each split whichever is less on the busiest link.

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
    of_splits = []
    for place, crossing in profile.crossing_bytes.items():
        ways = ["batch"]
        if num_tails > 1 and any(profile.columns[place + 1 :]):
            ways = [tail_split] if tail_split else ["batch", "columns"]
        tried = [
            _of_split(
                place,
                crossing * num_examples / num_workers,
                head,
                _Tail(tail, slice(place + 1, None), way == "columns"),
                fan,
                is_star and num_workers > 1,
            )
            for way in ways
        ]
        of_splits.append(min(tried, key=lambda cost: cost.busiest_bytes))
    return [of_whole, *of_splits]


def _of_split(place, sent, head, tail, fan, is_star):
    """The `SplitCost` of a place.

    Args:
        place: the place of the head's last call.
        sent: bytes of the activations of one worker.
        head, tail: `_Group` and `_Tail`.
        fan: as `_fan` returns it.
        is_star: as for `split_costs`.
    """
    out, into = fan
    front = slice(place + 1)
    sums = tail.ring_bytes(sent * len(head.ranks)) + head.owned_bytes(front)
    # Activations one way, and as many gradients the other way.
    to_tail, num_messages = sent, 2 * bool(sent)
    dense = head.dense_bytes(front)
    if is_star:
        to_tail, num_messages = sent + dense, num_messages + 2
        sums = sums + head.gathered_bytes(front) + tail.group.sum_bytes(dense)
    else:
        sums = sums + head.ring_bytes(front)
    both_ways = to_tail * (out + into)
    one_way = to_tail * float(np.maximum(out, into).max())
    travels = max(head.latency_seconds, tail.latency_seconds())
    travels += head.message_seconds(2 * one_way, num_messages)
    travels += head.message_seconds(
        float(sums.max()), head.num_exchanges(front)
    )
    star = len(head.ranks) * (sent + head.summed_bytes(front))
    # A process alone makes all passes.
    is_alone = not len(tail.group.ranks)
    last = head.seconds(tail.calls) if is_alone else tail.seconds()
    return SplitCost(
        place,
        head.parameter_bytes(front),
        sent,
        float((both_ways + sums).max()),
        0 if is_alone else star,
        head.seconds(front) + last + travels,
        travels,
        head.row_bytes(front),
        tail.split,
    )


class _Tail:
    """The tail workers, which divide a batch or columns.

    Args:
        group: their `_Group`.
        calls: a slice of the tail's calls.
        has_columns: whether they divide columns.
    """

    def __init__(self, group, calls, has_columns):
        self.group, self.calls = group, calls
        self.split = "columns" if has_columns else "batch"
        self._columns = {}
        if has_columns:
            sizes = group.profile.columns[calls]
            chosen = chosen_calls(sizes, group.num_examples)
            self._columns = {i: sizes[i] for i in chosen}

    def ring_bytes(self, arriving):
        """Bytes that each machine sends but to workers: an array.

        Args:
            arriving: bytes of the activations of all workers.
        """
        group, number = self.group, self.group.num_examples
        if not self._columns:
            return group.ring_bytes(self.calls)
        columns = self._columns.values()
        dense = group.dense_bytes(self.calls)
        # All of its parts but a rank's own travel once, of sums twice.
        once = arriving + sum(each.traveling_bytes(number) for each in columns)
        twice = dense - sum(each.kernel_bytes for each in columns)
        rows = group.gathered_bytes(self.calls, number)
        return group.sum_bytes(twice + once / 2) + rows

    def seconds(self):
        """Time of the passes and the update."""
        group = self.group
        if not self._columns:
            return group.seconds(self.calls)
        first = self.calls.start
        found = group.seconds(self.calls, group.num_examples)
        for place in self._columns:
            call = slice(first + place, first + place + 1)
            found += group.seconds(call)
            found -= group.seconds(call, group.num_examples)
        return found

    def latency_seconds(self):
        """That of sums of gradients, and of what the layers wait for."""
        # Activations; outputs of layers, and gradients of their inputs.
        rounds = 1 + (1 + 3 * len(self._columns)) / 2 * bool(self._columns)
        return rounds * self.group.latency_seconds


class _Group:
    """Ranks that train the same calls, each on its part of a batch.

    Args:
        profile, cluster: as for `split_costs`.
        ranks: a range.
        num_examples: the number of examples of a batch.
    """

    def __init__(self, profile, cluster, ranks, num_examples):
        self.profile, self._cluster = profile, cluster
        self.ranks, self.num_examples = ranks, num_examples
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

    def gathered_bytes(self, calls, num_examples=None):
        """Those of rows, which all ranks get.

        Args:
            calls: a slice.
            num_examples: of a rank; by default its part of the batch.
        """
        number = num_examples or self._examples
        rows = sum(each.row_bytes(number) for each in self._gradients(calls))
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
        return latency + num_bytes * self.profile.seconds_per_byte

    @property
    def latency_seconds(self):
        """Time of a sum of gradients that have no bytes."""
        hops = 2 * (self._size - 1) if self._hops.any() else 0
        return hops * (self._cluster.latency_seconds or 0)

    def seconds(self, calls, num_examples=None):
        """Time of the passes and the update; as for `gathered_bytes`."""
        profile = self.profile
        share = profile.time_share(num_examples or self._examples)
        seconds = share * sum(profile.seconds[calls])
        seconds += sum(profile.update_seconds[calls])
        busy = shared_by(self._cluster, self._size)
        return seconds * busy / self._cluster.relative_speed

    def _gradients(self, calls):
        return self.profile.gradients[calls]


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
