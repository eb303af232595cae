"""Tables that are looked up in a function of `tf.vectorized_map`.

TensorFlow makes one computation of all calls of the function, and has no such
form of messages. The function is traced as far as a lookup, which gives the ids
of all calls; their rows are pulled before, in one message, and handed to the
calls.
"""

import contextlib

import tensorflow as tf

from keras_sparsity._tf import keras_scopes, patches, tf_graphs
from keras_sparsity.tables import foreseen


def maps_pull_before(communicator):
    """While entered, `tf.vectorized_map` may look up rows of spread tables."""
    if communicator.size == 1:
        return contextlib.nullcontext()

    def make(stock):
        def vectorized_map(fn, elems, *args, **kwargs):
            if keras_scopes.in_symbolic_scope():
                return stock(fn, elems, *args, **kwargs)
            return _mapped(stock, fn, elems, args, kwargs)

        return vectorized_map

    return patches.VECTORIZED_MAP.by(make)


def _mapped(stock, fn, elems, args, kwargs):
    pulled = []  # rows of all calls, by lookup
    while True:
        asked = None

        def call(each):
            nonlocal asked
            elem, rows = each
            try:
                with foreseen.by(_Given(rows)):
                    return fn(elem)
            except _Lookup as lookup:
                asked = lookup
                return lookup.ids

        found = stock(call, (elems, tuple(pulled)), *args, **kwargs)
        if asked is None:
            return found
        pulled.append(asked.table.gather(found, asked.columns, asked.dtype))


class _Lookup(BaseException):
    """The first lookup without rows; ends a trace, through any user's code."""

    def __init__(self, table, ids, columns, dtype):
        self.table, self.ids = table, ids
        self.columns, self.dtype = columns, dtype


class _Given:
    """The rows of one call's lookups, in their order."""

    def __init__(self, rows):
        self._rows = list(rows)
        self._graph = tf_graphs.current()

    def rows(self, table, ids, columns, dtype):
        """As `foreseen.by` says."""
        if table.is_sharded and tf_graphs.current() is not self._graph:
            raise ValueError(
                f"'{table.owner_name}' is looked up in a loop, a branch or a "
                "`tf.function` within the function of a `tf.vectorized_map`. "
                "Look the rows up outside of that, or use `tf.map_fn`."
            )
        if not table.sends_messages:
            return None
        if self._rows:
            return self._rows.pop(0)
        columns = None if columns is None else slice(*columns)
        raise _Lookup(table, tf.identity(ids), columns, dtype)
