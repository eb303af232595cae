"""Checks of the arguments of `Collectives`: errors that name the call."""

import tensorflow as tf

from keras_sparsity._tf import checks
from keras_sparsity.collectives.engine import Route

REDUCE_OPS = ("sum", "mean", "max", "min")

_MOVED = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 "
    "float16 bfloat16 float32 float64 complex64"
).split()
_REDUCED = [name for name in _MOVED if name not in ("uint64", "complex64")]


def spelled(operation, name):
    """The call for messages, after a check of its role."""
    if not isinstance(name, str):
        expected = "a string, the call's role, the same on all ranks"
        checks.check(False, "name", name, expected)
    return f'{operation} "{name}"'


def tensors(values, call):
    """The list of values as tensors."""
    if not isinstance(values, list | tuple):
        raise ValueError(
            f"{call} received {type(values).__name__}. Expected a list of "
            "tensors, which travel in one message."
        )
    for value in values:
        if isinstance(value, tf.IndexedSlices):
            raise ValueError(
                f"{call} received tf.IndexedSlices. Expected dense tensors: "
                "use `tf.convert_to_tensor` on it first, or `all_gather` its "
                "indices and values."
            )
    return [_tensor(value, call, "tensors") for value in values]


def rows(value, call):
    """The value as a tensor of a known rank of at least 1."""
    tensor = _tensor(value, call, "tensor")
    check_moved(tensor.dtype, call)
    if not tensor.shape.rank:
        shape = "a scalar" if tensor.shape.rank == 0 else "an unknown rank"
        raise ValueError(
            f"{call} received {shape}. Expected a tensor of known rank with "
            "rows in its first dimension: use `tf.reshape(x, [1])` or "
            "`tf.ensure_shape`."
        )
    return tensor


def splits(value, size, call, name="splits", whose="for"):
    """The value as int32 `(size,)`."""
    found = _tensor(value, call, name)
    if not found.dtype.is_integer:
        raise ValueError(
            f"{call} received {name} of dtype {found.dtype.name}. "
            f"Expected integers: the number of rows {whose} each rank."
        )
    if not found.shape.is_compatible_with([size]):
        raise ValueError(
            f"{call} received {name} of shape {tuple(found.shape)}. "
            f"Expected ({size},): the number of rows {whose} each of the "
            f"{size} ranks, 0 for none."
        )
    return tf.cast(tf.ensure_shape(found, [size]), tf.int32)


def counts(value, size, call):
    """The value as int32 `(size,)`: each rank's number of rows."""
    return splits(value, size, call, "counts", "of")


def summing(tensor, splits, name):
    """`tensor`, after a check that `splits` sum to its number of rows."""
    return _checked(
        tensor,
        splits,
        f'all_to_all "{name}" received splits that do not sum to the number '
        "of rows of the tensor. Received splits",
    )


def counted(tensor, counts, rank, call):
    """`tensor`, after a check that it has this rank's number of rows."""
    return _checked(
        tensor,
        counts[rank : rank + 1],
        f"{call} received counts that do not give this rank, {rank}, the "
        "number of rows of its tensor. Received the count",
    )


def _checked(tensor, numbers, message):
    """`tensor`, after a check that numbers sum to its number of rows."""
    num_rows = tf.shape(tensor)[0]
    if tf.executing_eagerly():
        found = numbers.numpy()
        if found.sum() != int(num_rows) or (found < 0).any():
            raise ValueError(
                f"{message} {found.tolist()} for a tensor of {int(num_rows)} "
                "rows."
            )
        return tensor
    check = tf.raw_ops.Assert(
        condition=tf.equal(tf.reduce_sum(numbers), num_rows),
        data=[f"{message}:", numbers, "rows:", num_rows],
        summarize=1000,
    )
    with tf.control_dependencies([check]):
        return tf.identity(tensor)


def check_route(route, call):
    if not isinstance(route, Route):
        raise ValueError(
            f"{call} received route={checks.spell(route)}. Expected the "
            "`Route` that an `all_to_all` returned beside its rows."
        )


def check_root(root, size, call):
    if not (checks.is_integer(root) and 0 <= root < size):
        raise ValueError(
            f"{call} received root={checks.spell(root)}. Expected a rank "
            f"from 0 to {size - 1}."
        )


def check_moved(dtype, call):
    """Raises ValueError for a dtype that cannot be sent."""
    if dtype.name not in _MOVED:
        raise ValueError(
            f"{call} received a tensor of dtype {dtype.name}, which cannot be "
            f"sent between processes. Expected one of {', '.join(_MOVED)}. "
            "Send strings and other objects with `gather_objects`."
        )


def check_reduced(dtype, op, call):
    """Raises ValueError for a reduction that a dtype does not have."""
    if not (isinstance(op, str) and op in REDUCE_OPS):
        raise ValueError(
            f"{call} received op={checks.spell(op)}. Expected one of "
            f"{', '.join(map(repr, REDUCE_OPS))}."
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


def _tensor(value, call, name):
    try:
        return tf.convert_to_tensor(value)
    except Exception as error:  # whatever an object's own method raises
        raise ValueError(
            f"{call} received {checks.spell(value)} (of type "
            f"{type(value).__name__}) for `{name}`. Expected a tensor or "
            "a value that converts to one. Send other objects with "
            "`gather_objects`."
        ) from error
