"""How a strategy has each kind of variable travel."""

import dataclasses
import math

import tensorflow as tf

from keras_sparsity import checks
from keras_sparsity.collectives.wire import Wire

# Set on a Keras variable whose rows' way was found.
_ATTRIBUTE = "_keras_sparsity_rows"


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How gradients travel under one architecture of a strategy.

    Attributes:
        tables: that of `ks.ShardedTable`s that do not say it themselves.
        rows: that of gradients of rows of a variable which every rank has
            whole, such as an ordinary `Embedding`'s.
        dense: that of dense gradients: `"allreduce"`, or `"ps"`, by way of
            servers.
        merges: whether a rank sends each row once, and the dense gradients
            of a step in few messages.
    """

    tables: str
    rows: str
    dense: str = "allreduce"
    merges: bool = True


ARCHITECTURES = {
    "auto": Architecture("auto", "auto"),
    "hybrid": Architecture("ps", "allgather"),
    "allreduce": Architecture("allreduce", "allreduce"),
    "allgather": Architecture("allgather", "allgather"),
    "ps": Architecture("ps", "allgather", "ps"),
    "naive_ps": Architecture("ps", "allgather", "ps", merges=False),
}


def check(name, value):
    checks.check(
        isinstance(value, str) and value in ARCHITECTURES,
        name,
        value,
        f"one of {', '.join(map(repr, ARCHITECTURES))}",
    )


def of(strategy=None):
    """`Architecture` of a strategy, by default of the one entered."""
    strategy = strategy or tf.distribute.get_strategy()
    # Of another strategy, and of none: as nothing is trained there.
    return ARCHITECTURES[getattr(strategy, "architecture", "hybrid")]


def wire(dtype, strategy=None, cast_to=None):
    """The `Wire` in which rows and gradients of a dtype travel.

    Args:
        dtype: their own.
        strategy: by default the one entered.
        cast_to: what they are cast to where they arrive, if that is known. If
            it is narrower, they are cast where they come from.
    """
    strategy = strategy or tf.distribute.get_strategy()
    # Of those that are as narrow, the first.
    asked = [dtype, cast_to, getattr(strategy, "wire_dtype", None)]
    dtypes = [tf.as_dtype(each) for each in asked if each is not None]
    return Wire(dtypes[0], min(dtypes, key=lambda each: each.size))


def aggregates_locally(strategy=None):
    """Whether the ranks of a machine pull and push together."""
    strategy = strategy or tf.distribute.get_strategy()
    return of(strategy).merges and getattr(strategy, "local_aggregation", True)


def buckets(tensors, strategy=None):
    """Lists of places of dense gradients whose message is one.

    Those of the last variables come first: the backward pass ends with the
    first layers.
    """
    strategy = strategy or tf.distribute.get_strategy()
    limit = getattr(strategy, "bucket_bytes", None) or math.inf
    found, room = [], 0
    for place in reversed(range(len(tensors))):
        tensor = tensors[place]
        size = tensor.dtype.size * (tensor.shape.num_elements() or 0)
        if not found or size > room:
            found.append([])
            room = limit
        found[-1].append(place)
        room -= size
    return found


def of_rows(variable, strategy=None):
    """How the rows of a variable that every rank has whole travel.

    Returns:
        `"allgather"` or `"allreduce"`.
    """
    architecture = of(strategy).rows
    if architecture == "auto":
        architecture = getattr(variable, _ATTRIBUTE, "allgather")
    return architecture


def found_for_rows(variable, architecture):
    """Keeps what was found, for strategies that have it found."""
    setattr(variable, _ATTRIBUTE, architecture)
