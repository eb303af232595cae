"""The cost of each place where a head may end and a tail begin."""

import dataclasses

from keras_sparsity._tf import checks


@dataclasses.dataclass(frozen=True)
class Profile:
    """A model's layers and the network's links, as measured.

    Attributes:
        names: tuple of the calls' layers, in order.
        sizes: tuple of their `LayerSize`s.
        seconds: tuple of the times of their forward and backward passes, of
            `num_examples` examples.
        num_examples: see `seconds`.
        crossing_bytes: dict from a possible split's place to the bytes that
            cross it, of one example.
        seconds_per_byte: of the slowest link.
    """

    names: tuple
    sizes: tuple
    seconds: tuple
    num_examples: int
    crossing_bytes: dict
    seconds_per_byte: float


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
    """

    place: int | None
    head_bytes: int
    sent_bytes: float
    busiest_bytes: float
    star_bytes: float | None
    seconds: float


def split_costs(profile, num_workers, num_tails, num_examples):
    r"""Costs of data parallelism, and of each possible split.

    With W workers and M tail workers, P and T bytes of parameters in head and
    tail, and O bytes of a worker's activations, the links of a tail worker and
    of a worker carry, in each direction,

    .. math:: W O / M + 2 T (M-1)/M, \quad O + 2 P (W-1)/W

    Passes, activations, their gradients, and the sums of gradients follow each
    other, so their times add up. Passes take time in proportion to the number
    of examples. Without a flush there is nothing to overlap with.

    Args:
        profile: `Profile`.
        num_workers: W.
        num_tails: M; 0 if one process is alone.
        num_examples: the number of examples of a batch.

    Returns:
        List of `SplitCost`; the first is that of data parallelism over W + M
        processes.

    Raises:
        ValueError: if W or the number of examples is not positive.

    Example:

    >>> sizes = (LayerSize("dense", 10, 5), LayerSize("dense", 1000, 1))
    >>> profile = Profile(("a", "b"), sizes, (1.0, 1.0), 8, {0: 20}, 0.01)
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
    time_share = num_examples / profile.num_examples
    num_bytes = [4 * size.num_parameters for size in profile.sizes]
    size = num_workers + num_tails
    by_ring = _ring(sum(num_bytes), size)
    found = [
        SplitCost(
            None,
            sum(num_bytes),
            0,
            by_ring,
            None,
            sum(profile.seconds) * time_share / size
            + by_ring * profile.seconds_per_byte,
        )
    ]
    for place, crossing in profile.crossing_bytes.items():
        head = sum(num_bytes[: place + 1])
        sent = crossing * num_examples / num_workers
        # Of a process alone, nothing travels.
        arriving = sent * num_workers / num_tails if num_tails else 0
        of_head = _ring(head, num_workers)
        of_tail = _ring(sum(num_bytes) - head, max(1, num_tails))
        passes = (
            sum(profile.seconds[: place + 1]) / num_workers
            + sum(profile.seconds[place + 1 :]) / max(1, num_tails)
        ) * time_share
        found.append(
            SplitCost(
                place,
                head,
                sent,
                max(arriving + of_tail, sent + of_head) if num_tails else 0,
                num_workers * (sent + head) if num_tails else 0,
                passes
                + (2 * arriving + max(of_head, of_tail))
                * profile.seconds_per_byte,
            )
        )
    return found


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


def _ring(num_bytes, size):
    """Bytes that each of some processes sends to sum arrays of so many."""
    return 2 * num_bytes * (size - 1) / size
