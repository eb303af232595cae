"""The state of a training run, and its form on disk."""

import contextlib
import dataclasses
import math
import os

import h5py
import keras
import numpy as np
import tensorflow as tf

from keras_sparsity._tf import keras_models
from keras_sparsity.checkpoint import folder
from keras_sparsity.exchange.layout import Layout, common_rows, local_row_of
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.tables.table_variable import TableVariable
from keras_sparsity.update import lookups

# So much of a variable is in memory a second time, when written or read.
_BLOCK_BYTES = 1 << 22
# Set on a model of which ranks hold parts: a function that gives its `entries`,
# called by all ranks together.
OF_STAGES = "_keras_sparsity_entries"
# HDF5 has no such type: stored by its bits.
_STORED_AS = {"bfloat16": tf.uint16}


@dataclasses.dataclass
class Entry:
    """One variable of the state, as one process would have it.

    Args:
        section: `"model"`, `"optimizer"`, `"metrics"`, or `"prediction"`: what
            a schedule without a flush predicts weights from.
        name: its path, for messages.
        shape: tuple of the whole.
        dtype: its name.
        pieces: the variables that hold it here: itself, or one for each
            partition of this rank; none if it is on other ranks alone.
        layout: `Layout` of the partitions; None if each rank has the whole.
        is_replicated: whether it is the same on all ranks by construction.
            Of others each rank may have its own: random states, what metrics
            have counted so far, the states of a stateful layer.
        ranks: the ranks that have it, of which the first one writes it if they
            all have the same; None if each rank has it.
        holder: the number of its `keras_models.holders_of_metrics`; None of
            other sections, and of a model in stages.
    """

    section: str
    name: str
    shape: tuple
    dtype: str
    pieces: list
    layout: Layout | None = None
    is_replicated: bool = True
    ranks: tuple | None = None
    holder: int | None = None

    @property
    def variable(self):
        return self.pieces[0]

    def parts(self, rank):
        """`(partition, variable, number of rows)` of this rank's partitions."""
        if self.layout is None:
            num_rows = self.shape[0] if self.shape else 1
            return [(0, piece, num_rows) for piece in self.pieces]
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
    of_stages = getattr(model, OF_STAGES, None)
    if of_stages is not None:
        return of_stages()
    found = []
    trainable = {id(v) for v in model.trainable_variables}
    for variable in model.variables:
        is_spread = (
            isinstance(variable, TableVariable) and variable.table.is_sharded
        )
        for keeper in lookups.keepers_of([variable]):
            # A run that goes on from files has all rows up to date, too.
            keeper.settle()
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
        found += entries_of_metrics(model)
    return found


def entries_of_metrics(model):
    """List of `Entry` of the metrics that have variables so far."""
    holders = {
        id(variable): number
        for number, (_, metrics) in enumerate(
            keras_models.holders_of_metrics(model)
        )
        for metric in metrics
        for variable in metric.variables
    }
    found = []
    for variable in model.metrics_variables:
        entry = _entry("metrics", [variable], None, is_replicated=False)
        entry.holder = holders.get(id(variable))
        found.append(entry)
    return found


def described(table, pieces):
    """The name, shape and dtype of a variable as one process has it.

    Args:
        table: the table that it is, or is a slot of; None of others.
        pieces: as of an `Entry`, one at least.
    """
    first = pieces[0]
    shape = tuple(first.shape)
    if table is not None:
        shape = (table.num_rows, *shape[1:])
    dtype = keras.backend.standardize_dtype(first.dtype)
    return getattr(first, "path", first.name), shape, dtype


def _entry(section, pieces, table, is_replicated=True):
    return Entry(
        section,
        *described(table, pieces),
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
    dataset = group.create_dataset(name, shape, _stored_dtype(dtype))
    for place, values in _pieces(variable, shape):
        dataset[place] = _to_stored(values, dtype)


def spoiled(entries, rank, also_infinite):
    """Name of one of the model's variables that is spoiled here; or None.

    By NaN, and, if `also_infinite`, by infinity.
    """
    for entry in entries:
        is_float = tf.as_dtype(entry.dtype).is_floating
        if entry.section != "model" or not is_float:
            continue
        for _, variable, num_rows in entry.parts(rank):
            shape = entry.shape and (num_rows, *entry.shape[1:])
            for _, values in _pieces(variable, shape):
                values = tf.cast(values, tf.float32)
                bad = tf.math.is_nan(values)
                if also_infinite:
                    bad = tf.logical_not(tf.math.is_finite(values))
                if tf.reduce_any(bad):
                    return entry.name
    return None


def is_finite(loss):
    """Whether a loss, as it is in `logs`, is a finite number, or not there."""
    if loss is None:
        return True
    try:
        return bool(np.all(np.isfinite(np.asarray(loss, "float64"))))
    except (TypeError, ValueError):  # of a `train_step` that logs others
        return True


class Source:
    """A checkpoint's HDF5 file, of which only the expected is read.

    The file may be someone else's. Before anything is read or allocated, a
    dataset must have the shape and the dtype of the variable it is for, and
    hold all of its bytes in this file itself: not elsewhere, through a link, a
    virtual dataset or external storage, and not in a filter's few bytes.
    """

    def __init__(self, path):
        self._path = path
        with folder.opened(path) as opened:
            self._bytes = os.fstat(opened.fileno()).st_size

    def __enter__(self):
        with self._explained("/"):
            self._file = h5py.File(self._path, "r")
        return self

    def __exit__(self, *exception):
        self._file.close()

    def dataset(self, names, shape, dtype):
        """The dataset of a variable, or of one of its partitions.

        Args:
            names: of the groups in which it is, and its own.
            shape: its expected shape; None for any number.
            dtype: the variable's.

        Raises:
            ValueError: if it is not there, or another.
        """
        where = "/".join(names)
        with self._explained(where):
            *groups, name = names
            group = self._file
            for each in groups:
                group = self._inside(group, each, h5py.Group, where)
            found = self._inside(group, name, h5py.Dataset, where)
            self._check_stored_here(found, where)
            stored = np.dtype(_stored_dtype(dtype))
            if found.dtype != stored:
                self._refuse(where, f"is of {found.dtype} in place of {stored}")
            shape = tuple(
                size if expected is None else expected
                for size, expected in zip(found.shape, shape, strict=False)
            ) + tuple(shape[len(found.shape) :])
            if found.shape != shape:
                self._refuse(
                    where, f"has shape {found.shape} in place of {shape}"
                )
            size = math.prod(shape) * stored.itemsize
            if size and (
                found.id.get_storage_size() != size
                or found.id.get_offset() + size > self._bytes
            ):
                self._refuse(where, f"has not {size} bytes in the file")
            return found

    def text(self, name):
        """A string that is an attribute of the file."""
        with self._explained(name):
            attributes = self._file.attrs
            if name not in attributes:
                self._refuse(name, "is missing")
            facts = attributes.get_id(name)
            kind = h5py.check_string_dtype(facts.dtype)
            if facts.shape != () or kind is None or kind.length is not None:
                self._refuse(name, "is not a string")
            return attributes[name]

    def _inside(self, group, name, kind, where):
        links = group.id.links
        if not links.exists(name.encode()):
            self._refuse(where, "is missing")
        if links.get_info(name.encode()).type != h5py.h5l.TYPE_HARD:
            self._refuse(where, "is a link")
        found = group[name]
        if not isinstance(found, kind):
            self._refuse(where, f"is not a {kind.__name__.lower()}")
        return found

    def _check_stored_here(self, dataset, where):
        facts = dataset.id.get_create_plist()
        if facts.get_layout() != h5py.h5d.CONTIGUOUS:
            self._refuse(where, "is not stored in one piece")
        if facts.get_external_count():
            self._refuse(where, "is stored in other files")

    @contextlib.contextmanager
    def _explained(self, where):
        try:
            yield
        except (KeyError, RuntimeError, TypeError, OSError) as error:
            # HDF5's own, of a file that is none of ours.
            self._refuse(where, f"cannot be read ({error})", error)

    def _refuse(self, where, why, cause=None):
        raise ValueError(
            "The checkpoint does not hold what its index says: "
            f"'{where}' in {self._path} {why}. Move it out of its folder to "
            "go on from an earlier one, or to start anew."
        ) from cause


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
        num_rows: those of the whole table.
    """
    common = common_rows(source, target, num_rows)
    dtype = keras.backend.standardize_dtype(variable.dtype)
    # Rows of the dataset are read as they lie, those between them too.
    between = common.step // source[1]
    count = _rows_of_block(dataset.shape[1:], dtype, between)
    for start in range(0, len(common), count):
        rows = common[start : start + count]
        local = [local_row_of(row, source[1]) for row in (rows[0], rows[-1])]
        values = dataset[local[0] : local[1] + 1][::between]
        positions = local_row_of(np.asarray(rows), target[1])
        variable.value.scatter_update(
            tf.IndexedSlices(_from_stored(values, dtype), positions)
        )


def _pieces(variable, shape):
    """`(place, values)` of a variable, or of its first rows, block by block."""
    if not shape:
        yield (), variable.value
        return
    dtype = keras.backend.standardize_dtype(variable.dtype)
    count = _rows_of_block(shape[1:], dtype)
    for start in range(0, shape[0], count):
        stop = min(start + count, shape[0])
        # Not a slice: reading a variable copies it whole after sparse writes.
        rows = tf.gather(variable.value, tf.range(start, stop))
        yield slice(start, stop), rows


def _rows_of_block(row_shape, dtype, between=1):
    """How many rows are in memory at a time, each with those up to the next."""
    row_bytes = math.prod(row_shape) * tf.as_dtype(dtype).size
    return max(1, _BLOCK_BYTES // max(row_bytes * between, 1))


def _stored_dtype(dtype):
    return _STORED_AS.get(dtype, tf.as_dtype(dtype)).as_numpy_dtype


def _to_stored(value, dtype):
    value = tf.convert_to_tensor(value)
    if dtype in _STORED_AS:
        value = tf.bitcast(value, _STORED_AS[dtype])
    return value.numpy()


def _from_stored(values, dtype):
    if dtype in _STORED_AS:
        return tf.bitcast(tf.constant(values), tf.as_dtype(dtype))
    return tf.constant(values, tf.as_dtype(dtype))
