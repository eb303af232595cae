"""Where the processes of a run are: machines, and places on a machine."""

import dataclasses
import os

import tensorflow as tf

from keras_sparsity import checks

OVERRIDE = "KERAS_SPARSITY_TOPOLOGY"


@dataclasses.dataclass(frozen=True)
class Topology:
    """Where a process stands among all others, in Horovod's words.

    `rank` of `size` processes; `local_rank` of the `local_size` ones on its
    machine; `cross_rank` of the `cross_size` ones with its local rank.
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


def topology_of(rank, machines):
    """The topology of one rank.

    Args:
        rank: The rank.
        machines: List with the name of each rank's machine.
    """
    own_machine = [r for r, m in enumerate(machines) if m == machines[rank]]
    across = groups(machines)["across"][own_machine.index(rank)]
    return Topology(
        rank=rank,
        size=len(machines),
        local_rank=own_machine.index(rank),
        local_size=len(own_machine),
        cross_rank=across.index(rank),
        cross_size=len(across),
    )


def groups(machines):
    """The ranks of each machine, and those with the same local rank.

    Args:
        machines: List with the name of each rank's machine.

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
    """The machines' numbers, in the order in which they come.

    Args:
        machines: List with the name of each rank's machine.

    Example:

    >>> numbered(["b", "b", "a"])
    (0, 0, 1)
    """
    names = list(dict.fromkeys(machines))
    return tuple(names.index(machine) for machine in machines)


def override(rank, size):
    """The topology that the environment prescribes, or None.

    One machine can stand for several that way: the variable holds
    "local_rank,local_size,cross_rank,cross_size".
    """
    text = os.environ.get(OVERRIDE)
    if not text:
        return None
    try:
        local_rank, local_size, cross_rank, cross_size = map(
            int, text.split(",")
        )
    except ValueError:
        raise ValueError(
            f"{OVERRIDE} is {text!r}. Expected four numbers: "
            "local_rank,local_size,cross_rank,cross_size."
        ) from None
    try:
        return Topology(
            rank, size, local_rank, local_size, cross_rank, cross_size
        )
    except ValueError as error:
        raise ValueError(f"{OVERRIDE} is {text!r}: {error}") from None


def pin_gpu(local_rank, local_size):
    """Leaves this process the GPU of its local rank, where there are any.

    Args:
        local_rank: This process's place on its machine.
        local_size: The number of processes on its machine.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if local_size == 1 or len(gpus) < 2:
        return
    try:
        tf.config.set_visible_devices(gpus[local_rank % len(gpus)], "GPU")
    except RuntimeError as error:
        raise RuntimeError(
            "This process must choose its GPU before TensorFlow runs its "
            "first operation. Start the script with `keras-sparsity run`, or "
            "construct the strategy at its top."
        ) from error
