"""What the state of a training run consists of, and how it is stored."""

import dataclasses
import math

import h5py
import keras
import numpy as np
import tensorflow as tf

from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.tables.layout import Layout
from keras_sparsity.tables.table_variable import TableVariable

# So much of a variable is in memory a second time, when written or read.
_BLOCK_BYTES = 1 << 22
# HDF5 has no such type: stored by its bits.
_STORED_AS = {"bfloat16": tf.uint16}


@dataclasses.dataclass
class Entry:
    """One variable of the state, as one process would have it.

    Args:
        section: `"model"`, `"optimizer"` or `"metrics"`.
        name: its path, for messages.
        shape: tuple of the whole.
        dtype: its name.
        pieces: the variables that hold it here: itself, or one for each
            partition of this rank.
        layout: `Layout` of the partitions; None if each rank has the whole.
        is_replicated: whether it is the same on all ranks by construction.
            Of others each rank may have its own: random states, what metrics
            have counted so far, the states of a stateful layer.
    """

    section: str
    name: str
    shape: tuple
    dtype: str
    pieces: list
    layout: Layout | None = None
    is_replicated: bool = True

    @property
    def variable(self):
        return self.pieces[0]

    def parts(self, rank):
        """`(partition, variable, number of rows)` of what this rank owns."""
        if self.layout is None:
            return [(0, self.variable, self.shape[0] if self.shape else 1)]
        return [
            (partition, piece, self.layout.num_rows_of(partition))
            # A rank without a partition has one piece, without rows.
            for partition, piece in zip(
                self.layout.owned_partitions(rank), self.pieces, strict=False
            )
        ]


def entries(model):
    """All state of a model, its optimizer and its metrics: list of `Entry`.

    In an order that depends neither on the number of processes nor on that of
    partitions.
    """
    found = []
    trainable = {id(v) for v in model.trainable_variables}
    for variable in model.variables:
        is_spread = (
            isinstance(variable, TableVariable) and variable.table.is_sharded
        )
        table = variable.table if is_spread else None
        pieces = table.partitions if is_spread else [variable]
        found.append(_entry("model", pieces, table, id(variable) in trainable))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        if isinstance(optimizer, HybridOptimizer):
            places = optimizer.places()
        else:
            places = [(None, [v]) for v in optimizer.variables]
        found += [_entry("optimizer", p, table) for table, p in places]
        found += [
            _entry("metrics", [v], None, is_replicated=False)
            for v in model.metrics_variables
        ]
    return found


def _entry(section, pieces, table, is_replicated=True):
    first = pieces[0]
    shape = tuple(first.shape)
    if table is not None:
        shape = (table.num_rows, *shape[1:])
    return Entry(
        section,
        getattr(first, "path", first.name),
        shape,
        keras.backend.standardize_dtype(first.dtype),
        list(pieces),
        table.layout if table is not None else None,
        is_replicated or table is not None,
    )


# Between variables and HDF5 files, a block at a time.


def write(group, name, variable, num_rows=None):
    """Stores a variable, or its first rows, as a dataset of an HDF5 group."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    shape = tuple(variable.shape)
    if num_rows is not None and shape:
        shape = (num_rows, *shape[1:])
    stored = _STORED_AS.get(dtype, tf.as_dtype(dtype)).as_numpy_dtype
    dataset = group.create_dataset(name, shape, stored)
    if not shape:
        dataset[()] = _to_stored(variable.value, dtype)
        return
    for start, stop in _blocks(shape, tf.as_dtype(dtype).size):
        # Not a slice: reading a variable copies it whole after sparse writes.
        rows = tf.gather(variable.value, tf.range(start, stop))
        dataset[start:stop] = _to_stored(rows, dtype)


def read(dataset, variable):
    """Gives a variable the whole of a dataset."""
    dtype = keras.backend.standardize_dtype(variable.dtype)
    variable.assign(_from_stored(dataset[()], dtype))


def read_rows(dataset, source, variable, target, num_rows):
    """Gives a partition those of its rows that another one has.

    Args:
        dataset: HDF5 dataset of the rows of one partition.
        source: `(partition, number of partitions)` of the dataset: it has the
            rows that leave the remainder `partition`.
        variable: the variable of another partition, or of the whole.
        target: `(partition, number of partitions)` of the variable.
        num_rows: the number of rows of the whole table.
    """
    common = _common_rows(source, target, num_rows)
    dtype = keras.backend.standardize_dtype(variable.dtype)
    row_bytes = math.prod(dataset.shape[1:]) * tf.as_dtype(dtype).size
    # Rows of the dataset are read as they lie, those between them too.
    between = common.step // source[1]
    count = max(1, _BLOCK_BYTES // max(row_bytes * between, 1))
    for start in range(0, len(common), count):
        rows = common[start : start + count]
        local = [(row - source[0]) // source[1] for row in (rows[0], rows[-1])]
        values = dataset[local[0] : local[1] + 1][::between]
        positions = (np.asarray(rows) - target[0]) // target[1]
        variable.value.scatter_update(
            tf.IndexedSlices(_from_stored(values, dtype), positions)
        )


def _common_rows(source, target, num_rows):
    """Range of the rows that two partitions have in common."""
    (first, first_count), (second, second_count) = source, target
    step = math.lcm(first_count, second_count)
    for row in range(first, min(step, num_rows), first_count):
        if row % second_count == second:
            return range(row, num_rows, step)
    return range(0, 0, step)


def _blocks(shape, item_bytes):
    row_bytes = max(1, math.prod(shape[1:]) * item_bytes)
    count = max(1, _BLOCK_BYTES // row_bytes)
    for start in range(0, shape[0], count):
        yield start, min(start + count, shape[0])


def _to_stored(value, dtype):
    value = tf.convert_to_tensor(value)
    if dtype in _STORED_AS:
        value = tf.bitcast(value, _STORED_AS[dtype])
    return value.numpy()


def _from_stored(values, dtype):
    if dtype in _STORED_AS:
        return tf.bitcast(tf.constant(values), tf.as_dtype(dtype))
    return tf.constant(values, tf.as_dtype(dtype))


def open_file(path, mode="r"):
    """An HDF5 file, as a context manager."""
    return h5py.File(path, mode)
