"""The dtype in which a tensor travels, where an engine lacks its own."""

import dataclasses

import tensorflow as tf

from keras_sparsity import checks

REDUCE_OPS = ("sum", "mean", "max", "min")

_MOVED = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 "
    "float16 bfloat16 float32 float64 complex64"
).split()
_REDUCED = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 "
    "float16 bfloat16 float32 float64"
).split()


@dataclasses.dataclass(frozen=True)
class Wire:
    """A conversion to a dtype that an engine carries, and back.

    Attributes:
        source: The tensor's own dtype.
        dtype: The dtype that travels.
        bitcast: Whether the same bits travel, under another name.
    """

    source: tf.DType
    dtype: tf.DType
    bitcast: bool = False

    def encode(self, tensor):
        return self._convert(tensor, self.dtype)

    def decode(self, tensor):
        return self._convert(tensor, self.source)

    def carry(self, tensor, send, *args, **kwargs):
        """What arrives of a tensor that `send` sends, with these arguments."""
        return self.decode(send(self.encode(tensor), *args, **kwargs))

    def _convert(self, tensor, dtype):
        if self.source == self.dtype:
            return tensor
        if self.bitcast:
            return tf.bitcast(tensor, dtype)
        return tf.cast(tensor, dtype)


class Wires:
    """A table of wires.

    Args:
        carried: Names of the dtypes that travel as they are.
        casts: dict from a dtype's name to the one it is cast to.
        bitcasts: dict from a dtype's name to the one its bits travel as.
    """

    def __init__(self, carried, casts=None, bitcasts=None):
        self._wires = {}
        for name in carried:
            self._add(name, name, False)
        for source, target in (casts or {}).items():
            self._add(source, target, False)
        for source, target in (bitcasts or {}).items():
            self._add(source, target, True)

    def _add(self, source, target, bitcast):
        source, target = tf.as_dtype(source), tf.as_dtype(target)
        self._wires[source] = Wire(source, target, bitcast)

    def __call__(self, dtype):
        return self._wires[dtype]


def check_moved(dtype, call):
    """Raises ValueError for a dtype that cannot be sent."""
    if dtype.name not in _MOVED:
        raise ValueError(
            f"{call} received a tensor of dtype {dtype.name}, which cannot be "
            f"sent between processes. Expected one of {', '.join(_MOVED)}. "
            "Send strings and other objects with `gather_objects`."
        )


def check_reduced(dtype, op, call):
    """Raises ValueError for an operation that a dtype does not have."""
    if not (isinstance(op, str) and op in REDUCE_OPS):
        raise ValueError(
            f"{call} received op={checks.spell(op)}. Expected one of "
            f"{', '.join(repr(known) for known in REDUCE_OPS)}."
        )
    if dtype.name not in _REDUCED:
        raise ValueError(
            f"{call} received a tensor of dtype {dtype.name}, which cannot be "
            f"reduced. Expected one of {', '.join(_REDUCED)}."
        )
    if dtype == tf.bool and op not in ("max", "min"):
        raise ValueError(
            f"{call} received a bool tensor with op={op!r}. Use 'max' for "
            "any, 'min' for all, or cast it to int32 to count."
        )
    if op == "mean" and not dtype.is_floating:
        raise ValueError(
            f"{call} received a tensor of dtype {dtype.name} with op='mean', "
            "whose result it cannot hold. Cast it to a float dtype, or use "
            "op='sum'."
        )
