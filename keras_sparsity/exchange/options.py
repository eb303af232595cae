"""Options of the messages of a step, decided when a strategy is made."""

import dataclasses
import math

import tensorflow as tf

from keras_sparsity._tf import checks
from keras_sparsity.collectives.wire import Wire

_WIRE_DTYPES = ("float32", "bfloat16", "float16")


def check_wire_dtype(wire_dtype):
    """Checks a user's `wire_dtype`."""
    checks.check(
        wire_dtype is None
        or (isinstance(wire_dtype, str) and wire_dtype in _WIRE_DTYPES),
        "wire_dtype",
        wire_dtype,
        f"None or one of {', '.join(map(repr, _WIRE_DTYPES))}",
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """How rows and gradients travel under one strategy.

    Attributes:
        merges: sum duplicate rows before sending, and send the dense
            gradients of a step in few messages.
        wire_dtype: name of the narrowest dtype that rows and gradients travel
            in; None for their own.
        local_aggregation: whether the processes of a machine pull and push
            together.
        bucket_bytes: size of one message of dense gradients; None for any.
    """

    merges: bool = True
    wire_dtype: str | None = None
    local_aggregation: bool = True
    bucket_bytes: int | None = None

    @property
    def aggregates_locally(self):
        """Whether messages go through machines where the cluster allows it."""
        return self.merges and self.local_aggregation

    def goes_through_machines(self, communicator):
        """Whether messages go through machines.

        That takes several machines, with as many processes on each.

        Args:
            communicator: `Collectives` of all ranks.
        """
        machines = communicator.machines
        counts = [machines.count(machine) for machine in machines]
        is_possible = min(counts) == max(counts) and (
            1 < min(counts) < len(machines)
        )
        return self.aggregates_locally and is_possible

    def wire(self, dtype, cast_to=None):
        """The `Wire` of rows or gradients of a dtype.

        Args:
            dtype: dtype of the tensor.
            cast_to: dtype that the receiver casts to, if known; the sender
                casts to it where it is narrower.
        """
        asked = [dtype, cast_to, self.wire_dtype]
        dtypes = [tf.as_dtype(each) for each in asked if each is not None]
        # `min` takes the first of equally narrow ones.
        return Wire(dtypes[0], min(dtypes, key=lambda each: each.size))

    def buckets(self, tensors):
        """Splits dense gradients into messages of one dtype.

        Returns:
            Dictionary from the name of each message to a list of indices. The
            last variables come first, because the backward pass ends with the
            first layers.
        """
        limit = self.bucket_bytes or math.inf
        found, room = {}, {}
        for index in reversed(range(len(tensors))):
            tensor = tensors[index]
            name = tensor.dtype.name
            size = tensor.dtype.size * (tensor.shape.num_elements() or 0)
            of_dtype = found.setdefault(name, [])
            if not of_dtype or size > room[name]:
                of_dtype.append([])
                room[name] = limit
            of_dtype[-1].append(index)
            room[name] -= size
        return {
            f"{name}/{number}": bucket
            for name, of_dtype in found.items()
            for number, bucket in enumerate(of_dtype)
        }


def entered():
    """`Options` of the entered strategy; the defaults outside of any.

    For calls of users in a step that name no strategy: a table's `gather` and
    the loss of `SampledSoftmax`. All else is handed its options.
    """
    return getattr(tf.distribute.get_strategy(), "options", Options())
