"""Ranks and machines: each process's place among all others."""

import dataclasses
import os

from keras_sparsity._tf import checks

OVERRIDE = "KERAS_SPARSITY_TOPOLOGY"


@dataclasses.dataclass(frozen=True)
class Topology:
    """A process's place among all others, in Horovod's terms.

    Args:
        rank, size: Number of the process, from 0 on, and of processes.
        local_rank, local_size: The same among the processes of its machine.
        cross_rank, cross_size: The same among the processes that have its
            local rank, one on each machine.

    Raises:
        ValueError: If a rank is not an integer from 0 to its size - 1.

    Example:

    >>> Topology(rank=3, size=4, local_rank=1, local_size=2, cross_rank=1,
    ...          cross_size=2).local_rank
    1

    References:
        Horovod's `horovod/runner/common/util/hosts.py` (`SlotInfo`).
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1

    def __post_init__(self):
        for kind in ("", "local_", "cross_"):
            rank, size = (getattr(self, f"{kind}{x}") for x in ("rank", "size"))
            are_integers = isinstance(rank, int) and isinstance(size, int)
            if not (are_integers and 0 <= rank < size):
                raise ValueError(
                    f"`{kind}rank` must be an integer from 0 to {kind}size - "
                    f"1. Received: {kind}rank={checks.spell(rank)}, "
                    f"{kind}size={checks.spell(size)}."
                )

    def to_override(self):
        """The value of the variable that `override` reads."""
        places = self.local_rank, self.local_size, self.cross_rank
        return ",".join(map(str, (*places, self.cross_size)))


def topologies(machines):
    """The `Topology` of each rank, by the name of its machine.

    Example:

    >>> [place.to_override() for place in topologies(["a", "a", "b"])]
    ['0,2,0,2', '1,2,0,1', '0,1,1,2']
    """
    places = [{} for _ in machines]
    for kind, of_kind in (("local", "machine"), ("cross", "across")):
        for ranks in groups(machines)[of_kind]:
            for number, rank in enumerate(ranks):
                places[rank][f"{kind}_rank"] = number
                places[rank][f"{kind}_size"] = len(ranks)
    size = len(machines)
    return [Topology(rank, size, **p) for rank, p in enumerate(places)]


def groups(machines):
    """The ranks of each machine, and those of each local rank.

    Returns:
        dict of "machine" and "across": lists of lists of ranks.
    """
    members = {}
    for rank, machine in enumerate(machines):
        members.setdefault(machine, []).append(rank)
    by_machine = list(members.values())
    across = [
        [ranks[local_rank] for ranks in by_machine if local_rank < len(ranks)]
        for local_rank in range(max(map(len, by_machine)))
    ]
    return {"machine": by_machine, "across": across}


def numbered(machines):
    """Numbers of the ranks' machines, in order of appearance.

    Example:

    >>> numbered(["b", "b", "a"])
    (0, 0, 1)
    """
    names = list(dict.fromkeys(machines))
    return tuple(names.index(machine) for machine in machines)


def override(rank, size):
    """The topology that the environment prescribes, or None.

    With it one machine emulates several: the variable holds
    "local_rank,local_size,cross_rank,cross_size".
    """
    text = os.environ.get(OVERRIDE)
    if not text:
        return None
    try:
        places = [int(part) for part in text.split(",")]
        if len(places) != 4:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{OVERRIDE} is {text!r}. Expected four numbers: "
            "local_rank,local_size,cross_rank,cross_size."
        ) from None
    try:
        return Topology(rank, size, *places)
    except ValueError as error:
        raise ValueError(f"{OVERRIDE} is {text!r}: {error}") from None
