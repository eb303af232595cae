"""Rows of an `Embedding` that a step reads at a server."""

import numpy as np
import tensorflow as tf


class PulledRows:
    """Of a `CurrentVariable`: has its readers get rows from a server.

    Args:
        variable: the model's variable.
        pull: function of row numbers, a NumPy array, that returns the rows.
        layer_name: the layer's name, for messages.
        keeps: whether `read` is to give the rows of a step.
    """

    # What `CurrentVariable` asks for.
    is_writing = is_replica = False

    def __init__(self, variable, pull, layer_name, keeps):
        self._variable, self._pull = variable, pull
        self._layer_name, self._keeps = layer_name, keeps
        self._pulled = []  # in this step, `(row numbers, rows)`

    def forget(self):
        """Begins a step."""
        self._pulled = []

    def read(self, ids):
        """Rows that were read in this step, by their numbers."""
        rows = tf.numpy_function(
            self._read, [ids], self._variable.dtype, stateful=True
        )
        return tf.ensure_shape(rows, [None, *self._variable.shape[1:]])

    def _read(self, ids):
        known, rows = map(np.concatenate, zip(*self._pulled, strict=True))
        order = np.argsort(known, kind="stable")
        # Of a row that was read again, the last one.
        last = np.searchsorted(known, ids, side="right", sorter=order) - 1
        return rows[order[last]]

    def _pull_and_keep(self, ids):
        rows = self._pull(ids)
        if self._keeps:
            self._pulled.append((ids, rows))
        return rows

    def rows_now(self, variable, ids, rows):
        """Rows from their server, with the gradient of the stored ones."""
        unique, index = tf.unique(tf.reshape(tf.cast(ids, tf.int64), [-1]))
        pulled = tf.numpy_function(
            self._pull_and_keep, [unique], variable.dtype, stateful=True
        )
        pulled.set_shape([None, *variable.shape[1:]])
        current = tf.reshape(tf.gather(pulled, index), tf.shape(rows))

        @tf.custom_gradient
        def replaced(rows):
            return tf.identity(current), tf.identity

        return replaced(rows)

    def settle(self):
        raise ValueError(
            f"A training step reads the whole table of '{self._layer_name}', "
            "as a regularizer or a layer that shares it does. Under "
            '`delay="bounded"` the rows of an Embedding are at a server. Read '
            'rows alone, or use `delay="fixed"`.'
        )

    def note_write(self, variable):
        self.settle()
