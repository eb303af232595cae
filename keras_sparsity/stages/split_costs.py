"""The cost of each place where a head may end and a tail begin."""

import dataclasses
import math

import numpy as np

from keras_sparsity.data.batches import bounds
from keras_sparsity.planning.specs import Cluster
from keras_sparsity.stages.data_parallel_cost import data_parallel
from keras_sparsity.stages.machine_links import crossings
from keras_sparsity.stages.rank_groups import RankGroup, TailGroup


@dataclasses.dataclass(frozen=True)
class SplitCost:
    """A step of a model that is divided at one place.

    Attributes:
        place: the place of the head's last call; None of data parallelism,
            whose head is the whole model.
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
    pairs=(),
    is_by_worker=False,
):
    r"""Costs of each possible split.

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
    times add up, those of messages on links and at processors, too. Without a
    flush there is nothing to overlap with.

    Args:
        profile: `Profile`.
        num_workers: W.
        num_tails: M; 0 if one process is alone.
        num_examples: the number of examples of a batch.
        cluster: `planning.Cluster`; by default a machine for each process,
            and links that take no time.
        is_star: whether the head's gradients are summed at the tail workers,
            which send back the sums; else by AllReduce. Then P, of dense
            gradients, travels as O does, and several tail workers sum it by
            AllReduce.
        tail_split: what several tail workers divide: `"batch"`, `"columns"`,
            or None: of each split whichever is less on the busiest link.
        pairs: the places of calls that compute with pairs of examples, which
            need whole mini-batches; a split that divides these is left out.
        is_by_worker: whether the tail computes its workers' parts one after
            the other.

    Returns:
        List of `SplitCost`, in the order of places.

    Example:

    >>> from keras_sparsity.stages.layer_placement import LayerSize
    >>> from keras_sparsity.stages.profile import GradientSize, Profile
    >>> sizes = (LayerSize("dense", 10, 5), LayerSize("dense", 1000, 1))
    >>> gradients = (GradientSize(40), GradientSize(4000))
    >>> profile = Profile(
    ...     ("a", "b"), sizes, (1.0, 1.0), 8, {0: 20}, gradients)
    >>> cluster = Cluster(3, megabits_per_second=8e-4)  # 0.01 s a byte
    >>> (split,) = split_costs(profile, 2, 1, num_examples=8, cluster=cluster)
    >>> split.busiest_bytes, split.seconds
    (160.0, 5.1)

    References:
        RALP (Park et al.), the profiler and table 2.
    """
    size = num_workers + num_tails
    cluster = cluster or Cluster(size)
    head, tail = (
        RankGroup(profile, cluster, ranks, num_examples)
        for ranks in (range(num_workers), range(num_workers, size))
    )
    fan = _fan(num_workers, num_tails, cluster)
    by_worker = is_by_worker and num_workers > 1
    divided = ["batch"] if num_tails > 1 or by_worker else []
    found = []
    for place, crossing in profile.crossing_bytes.items():
        ways = ["batch"]
        if num_tails > 1 and any(profile.columns[place + 1 :]):
            ways = [tail_split] if tail_split else ["batch", "columns"]
        tried = [
            _of_split(
                place,
                crossing * num_examples / num_workers,
                head,
                TailGroup(tail, slice(place + 1, None), way == "columns"),
                fan,
                is_star and num_workers > 1,
            )
            for way in ways
            if not _divides_any(pairs, place, num_workers > 1, way in divided)
        ]
        if tried:
            found.append(min(tried, key=lambda cost: cost.busiest_bytes))
    return found


def _divides_any(calls, place, divides_head, divides_tail):
    """Whether one of some calls is in a half that has parts of a batch."""
    return any(
        divides_head if call <= place else divides_tail for call in calls
    )


def _of_split(place, sent, head, tail, fan, is_star):
    """The `SplitCost` of a place.

    Args:
        sent: bytes of the activations of one worker.
        head, tail: `RankGroup` and `TailGroup`.
        fan: as `_fan` returns it.
    """
    out, into = fan
    front = slice(place + 1)
    # Activations one way, and as many gradients the other way.
    to_tail, num_messages = sent, 2 * bool(sent)
    of_tail = tail.ring_bytes(sent * len(head.ranks))
    if is_star:
        dense = head.dense_bytes(front)
        to_tail, num_messages = sent + dense, num_messages + 2
        of_head = head.gathered_bytes(front)
        of_tail += tail.group.sum_bytes(dense)
    else:
        of_head = head.ring_bytes(front)
    sums = tail.group.on_links(of_tail) + head.on_links(of_head)
    sums = sums + head.owned_bytes(front)
    both_ways = to_tail * (out + into)
    one_way = to_tail * float(np.maximum(out, into).max())
    travels = max(head.latency_seconds, tail.latency_seconds())
    travels += head.message_seconds(2 * one_way, num_messages)
    travels += head.message_seconds(
        float(sums.max()), head.num_exchanges(front)
    )
    star = len(head.ranks) * (sent + head.summed_bytes(front))
    is_alone = not len(tail.group.ranks)
    if is_alone:  # It makes all passes.
        works = head.seconds(slice(None))
    else:
        works = head.seconds(front) + tail.seconds()
        works += _fan_seconds(head, tail.group, 2 * to_tail, num_messages)
        # Both at once.
        works += max(
            head.at_processors(front, of_head), tail.at_processors(of_tail)
        )
    return SplitCost(
        place,
        head.parameter_bytes(front),
        sent,
        float((both_ways + sums).max()),
        0 if is_alone else star,
        works + travels,
        travels,
        head.row_bytes(front),
        tail.split,
    )


def _fan(num_workers, num_tails, cluster):
    """Arrays: the workers' messages that leave, and that reach, a machine.

    With more tail workers than workers a worker's message is divided among its
    tail workers.
    """
    if not num_tails:
        return crossings([], [], cluster)
    parts = parts_of_ranks(num_workers, num_tails)
    ranks = [rank for rank, own in enumerate(parts) for _ in own]
    heads, tails = ranks[: len(ranks) // 2], ranks[len(ranks) // 2 :]
    share = num_workers / len(heads)
    return tuple(share * each for each in crossings(heads, tails, cluster))


def parts_of_ranks(num_workers, num_tails):
    """The parts of a batch that each rank of head and tail computes.

    There are as many parts as ranks in the larger one of the two. A list of
    ranges, the workers' first.

    Example:

    >>> parts_of_ranks(3, 2)
    [range(0, 1), range(1, 2), range(2, 3), range(0, 1), range(1, 3)]
    """
    number = max(num_workers, num_tails)
    return [
        range(*bounds(number, rank, num_ranks))
        for num_ranks in (num_workers, num_tails)
        for rank in range(num_ranks)
    ]


def _fan_seconds(head, tails, num_bytes, num_messages):
    """Time of processors for the messages between workers and their tails.

    Args:
        head, tails: the `RankGroup`s.
        num_bytes: those of a worker, both ways.
        num_messages: those of a worker and one tail worker, both ways.
    """
    number = max(len(head.ranks), len(tails.ranks))
    share = len(head.ranks) / number
    most = [math.ceil(number / len(group.ranks)) for group in (head, tails)]
    return sum(
        group.processor_seconds(parts * share * num_bytes, parts * num_messages)
        for group, parts in zip((head, tails), most, strict=True)
    )


def of_data_parallelism(facts, cluster, num_examples, engine="native"):
    """The `SplitCost` of the place None: see `data_parallel`."""
    cost = data_parallel(facts, cluster, num_examples, engine)
    gradients = facts.profile.gradients
    part = num_examples / cluster.size
    return SplitCost(
        None,
        sum(each.parameter_bytes for each in gradients),
        0,
        cost.busiest_bytes,
        None,
        cost.step_seconds,
        cost.link_seconds,
        sum(each.owned_bytes(part) for each in gradients),
    )


def fastest(costs):
    """The place of the least predicted time; None: data parallelism.

    Example:

    >>> fastest([SplitCost(None, 8, 0, 8, None, 0.2),
    ...          SplitCost(3, 4, 1, 2, 5, 0.1)])
    3
    """
    return min(costs, key=lambda cost: cost.seconds).place
