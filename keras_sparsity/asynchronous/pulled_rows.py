"""Rows of an `Embedding` that a step reads at a server."""

import numpy as np
import tensorflow as tf

from keras_sparsity._tf.numpy_functions import NumpyFunctions
from keras_sparsity.tables import foreseen


class PulledRows:
    """Of a `CurrentVariable`: has its readers get rows from servers.

    It is the variable's keeper and its reader, see `read_by`, and what lookups
    ask of `foreseen` in place of a table.

    Args:
        variable: the model's.
        pull: function of row numbers, a NumPy array, that returns the rows,
            encoded.
        read_version: function of a tensor that is there when the step has
            pulled its weights, also for a `tf.function` that others call too.
        layer_name: the layer's name, for messages.
        keeps: whether `read` is to give the rows of a step.
        wire: the `Wire` by which rows travel.

    Attributes:
        variable, wire: as above.
        arriving: list of the rows that the step in tracing pulls beside its
            weights.
    """

    # What `CurrentVariable` asks for.
    is_writing = is_replica = False
    # What `foreseen` asks for.
    is_sharded = sends_messages = True

    def __init__(self, variable, pull, read_version, layer_name, keeps, wire):
        self.variable, self.wire, self._pull = variable, wire, pull
        self._read_version = read_version
        self._layer_name, self._keeps = layer_name, keeps
        self.dim = variable.shape[-1]
        self._numpy_function = NumpyFunctions()
        self._pulled = []  # in this step, `(row numbers, rows)`
        self.end_trace()

    def begin_trace(self, begun):
        """Rows of a step in tracing are pulled beside its weights.

        Args:
            begun: a tensor that is there when the step may pull.
        """
        self._begun = begun

    def end_trace(self):
        self._begun, self.arriving = None, []

    def forget(self):
        """Begins a step."""
        self._pulled = []

    def keep(self, ids, rows):
        """Takes rows that were pulled in this step, encoded."""
        self._pulled.append((ids, rows if self._keeps else None))

    def looked_up(self, ids, *values):
        """Of rows of a gradient, and values of each, those of this step.

        The gradient of a branch without lookups is zeros for all rows.
        """
        if len(ids) < self.variable.shape[0]:
            return ids, *values
        known = [np.empty(0, np.int64), *(known for known, _ in self._pulled)]
        is_known = np.isin(ids, np.concatenate(known))
        return [part[is_known] for part in (ids, *values)]

    def read(self, ids):
        """Rows that were read in this step, by their numbers; encoded."""
        rows = self._numpy_function(self._read, [ids], self.wire.dtype)
        return tf.ensure_shape(rows, [None, self.dim])

    def _read(self, ids):
        if not self._pulled:
            # Of a branch without lookups, see `looked_up`.
            dtype = self.wire.dtype.as_numpy_dtype
            return np.zeros([len(ids), self.dim], dtype)
        known, rows = map(np.concatenate, zip(*self._pulled, strict=True))
        order = np.argsort(known, kind="stable")
        # Of a row that was read again, the last one.
        last = np.searchsorted(known, ids, side="right", sorter=order) - 1
        return rows[order[last]]

    def rows(self, ids):
        """Rows by their numbers, those that the step's pull has brought too."""
        rows = foreseen.rows(self, ids, None, self.wire.source)
        if rows is None:
            rows = self.wire.decode(self._pulled_alone(ids))
            rows.set_shape([None, self.dim])
        return rows

    def _pulled_alone(self, ids):
        """Pulls rows: beside the weights, or in a branch or loop after them."""
        graph = tf.compat.v1.get_default_graph()
        is_beside = self._begun is not None and self._begun.graph is graph
        # Operations with state wait for each other.
        after = self._begun if is_beside else self._read_version()
        rows = self._numpy_function(
            *(self._pull_now, [ids, after], self.wire.dtype),
            stateful=not is_beside,
        )
        if is_beside:
            self.arriving.append(rows)
        return rows

    def _pull_now(self, ids, after):
        rows = self._pull(ids)
        self.keep(ids, rows)
        return rows

    def whole(self):
        self.settle()

    def settle(self):
        raise ValueError(
            f"A training step reads the whole table of '{self._layer_name}', "
            "as a regularizer or a layer that shares it does. Under "
            '`delay="bounded"` the rows of an Embedding are at servers. Read '
            'rows alone, or use `delay="fixed"`.'
        )

    def note_write(self, variable):
        self.settle()


def rows_of(gradient):
    """The gradient of a table, as rows: that of a loop's lookups is dense."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = tf.where(tf.reduce_any(gradient != 0, -1))[:, 0]
    return tf.IndexedSlices(
        tf.gather(gradient, rows), rows, tf.shape(gradient, tf.int64)
    )
