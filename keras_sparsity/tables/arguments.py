"""Checks of the arguments of a `ShardedTable`."""

import contextlib

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import checks
from keras_sparsity.placement import choice
from keras_sparsity.tables.table_variable import to_numpy


def check_spreading(num_partitions, partition_group, architecture):
    """Checks how a table is to be spread; returns `num_partitions`."""
    checks.optional_string("partition_group", partition_group)
    choice.check_requested(architecture)
    if num_partitions is None:
        return None
    otherwise = ", or None for the number of processes"
    return checks.num_partitions("num_partitions", num_partitions, otherwise)


def check_functions(to_stock, **others):
    """Checks the functions of rows: a regularizer and a constraint, too."""
    checks.function(
        "to_stock", to_stock, "None or a function of the table's array"
    )
    for kind, value in others.items():
        checks.function(
            kind, value, f"None or a callable, such as Keras's {kind}s"
        )


def check_is_float(dtype):
    """Raises ValueError unless a value is a floating-point dtype, or None."""
    kinds = (str, type, np.dtype, tf.DType)
    try:
        is_float = dtype is None or (
            isinstance(dtype, kinds) and tf.as_dtype(dtype).is_floating
        )
    except TypeError:
        is_float = False
    checks.check(
        is_float,
        "dtype",
        dtype,
        "None or a floating-point dtype, such as 'float32'",
    )


def part_of_row(columns, dim):
    """`(start, stop)` of a slice of a row; None for all of it."""
    start = stop = 0
    with contextlib.suppress(TypeError):  # of ends that are no integers
        if isinstance(columns, slice) and columns.step in (None, 1):
            start, stop, _ = columns.indices(dim)
    checks.check(
        start < stop,
        "columns",
        columns,
        f"a slice of some of the {dim} columns, of a step of 1",
    )
    return None if stop - start == dim else (start, stop)


def ids(values, owner_name):
    """Ids of any shape, as a tensor of integers."""
    tensor = checks.tensor("ids", values, "a tensor or array of integers")
    if not tensor.dtype.is_integer:
        raise ValueError(
            f"{owner_name}: ids must be integers. "
            f"Received: ids of dtype {tensor.dtype.name}."
        )
    return tensor


def whole(table, values):
    """The array `(num_rows, dim)` of new values of a whole table."""
    try:
        array = to_numpy(values)
    except Exception as error:  # whatever an object's own method raises
        raise ValueError(
            f"`whole` must be an array of the table '{table.owner_name}'. "
            f"Received: {checks.spell(values)}, of which NumPy makes none: "
            f"{checks.shortened(error)}"
        ) from error
    if array.shape != (table.num_rows, table.dim):
        raise ValueError(
            "The shape of `whole` does not match the table "
            f"'{table.owner_name}'. Received: shape {array.shape}. "
            f"Expected: {(table.num_rows, table.dim)}."
        )
    if array.dtype.kind not in "fiubV":  # V: bfloat16
        raise ValueError(
            f"`whole`, the table '{table.owner_name}', must be real "
            f"numbers. Received: an array of dtype {array.dtype}."
        )
    return array
