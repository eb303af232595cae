"""Options of the messages of a step, decided when a strategy is made."""

import dataclasses
import logging
import math

import tensorflow as tf

from keras_sparsity._tf import checks
from keras_sparsity.collectives.wire import Wire
from keras_sparsity.exchange.row_wire import RowWire, row_bytes

_WIRE_DTYPES = ("float32", "bfloat16", "float16")
_OF_ROWS = "int8"
# Of all else where rows travel in 8 bits.
_BESIDE_ROWS = "bfloat16"
# Set on a communicator, which strategies share, whose machines were told of.
_TOLD = "_keras_sparsity_told_of_uneven_machines"


def check_wire_dtype(wire_dtype, has_rows=False):
    """Checks a user's `wire_dtype`; "int8" is one of rows only."""
    dtypes = (*_WIRE_DTYPES, *[_OF_ROWS] * has_rows)
    checks.check(
        wire_dtype is None
        or (isinstance(wire_dtype, str) and wire_dtype in dtypes),
        "wire_dtype",
        wire_dtype,
        f"None or one of {', '.join(map(repr, dtypes))}",
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
        counts = _counts(communicator)
        is_possible = min(counts) == max(counts) and (
            1 < min(counts) < len(communicator.machines)
        )
        return self.aggregates_locally and is_possible

    def tell_of_uneven_machines(self, communicator):
        """Logs, once and on rank 0, if machines that could aggregate do not.

        Args:
            communicator: `Collectives` of all ranks.
        """
        counts = _counts(communicator)
        if (
            communicator.rank == 0
            and self.aggregates_locally
            and min(counts) < max(counts)
            and not getattr(communicator, _TOLD, False)
        ):
            setattr(communicator, _TOLD, True)
            logging.getLogger(__name__).warning(
                "`local_aggregation` has no effect: it needs machines with "
                "equally many processes, and they have %s.",
                ", ".join(
                    str(communicator.machines.count(machine))
                    for machine in dict.fromkeys(communicator.machines)
                ),
            )

    def wire(self, dtype, cast_to=None):
        """The `Wire` of rows or gradients of a dtype.

        Args:
            dtype: dtype of the tensor.
            cast_to: dtype that the receiver casts to, if known; the sender
                casts to it where it is narrower.
        """
        of_all = self.wire_dtype
        of_all = _BESIDE_ROWS if of_all == _OF_ROWS else of_all
        asked = [dtype, cast_to, of_all]
        dtypes = [tf.as_dtype(each) for each in asked if each is not None]
        # `min` takes the first of equally narrow ones.
        return Wire(dtypes[0], min(dtypes, key=lambda each: each.size))

    def row_wire(self, dtype, width, cast_to=None):
        """The conversion of rows of tables.

        Args:
            dtype, cast_to: as for `wire`.
            width: numbers of a row.

        Returns:
            `RowWire` where the user asked for 8 bits and rows are wide enough
            for that and a scale; else `Wire`.
        """
        wire = self.wire(dtype, cast_to)
        is_shorter = row_bytes(width) < wire.num_bytes(width)
        if self.wire_dtype == _OF_ROWS and is_shorter:
            return RowWire(tf.as_dtype(dtype))
        return wire

    def encoded_bytes(self, dtype, width):
        """Bytes of a row in 8 bits; None where it travels in a dtype."""
        wire = self.row_wire(dtype, width)
        return wire.num_bytes(width) if isinstance(wire, RowWire) else None

    def gradient_wire(self, dtype, width, role, rank):
        """The conversion of the gradients of rows, see `row_wire`.

        Args:
            dtype, width: as for `row_wire`.
            role, rank: where they are sent, see `RowWire`.
        """
        wire = self.row_wire(dtype, width)
        if isinstance(wire, RowWire):
            return dataclasses.replace(
                wire, is_drawn=True, role=role, rank=rank
            )
        return wire

    @property
    def draws_gradients(self):
        """Whether gradients of rows may be drawn by the step's number."""
        return self.wire_dtype == _OF_ROWS

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


def _counts(communicator):
    """Of each rank, the number of processes on its machine."""
    machines = communicator.machines
    return [machines.count(machine) for machine in machines]


def entered():
    """`Options` of the entered strategy; the defaults outside of any.

    For calls of users in a step that name no strategy: a table's `gather` and
    the loss of `SampledSoftmax`. All else is handed its options.
    """
    return getattr(tf.distribute.get_strategy(), "options", Options())
