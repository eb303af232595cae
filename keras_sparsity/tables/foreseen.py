"""Rows that a call asks for, from an object that foresees them."""

import tensorflow as tf

from keras_sparsity._tf import contexts

# Objects that foresee rows, the inmost last.
sources = []


def by(source):
    """While entered, tables ask an object for rows before they pull them.

    Args:
        source: object with `rows(table, ids, columns, dtype)`, of the
            arguments of `ShardedTable.gather`: it returns the rows, or None.
    """
    return contexts.on_top(sources, source)


def rows(table, ids, columns, dtype):
    """The rows, or None if the table is to pull them."""
    if not sources:
        return None
    return sources[-1].rows(table, ids, columns, dtype)


def completed(requests, gather):
    """The rows of several requests, of which some may be foreseen.

    Args:
        requests: list of `(table, ids, dtype)`.
        gather: function of a list of them that returns a list of rows, called
            with those that are not.
    """
    found = [
        rows(table, ids, None, tf.as_dtype(dtype))
        for table, ids, dtype in requests
    ]
    missing = [
        request
        for request, of_request in zip(requests, found, strict=True)
        if of_request is None
    ]
    others = iter(gather(missing) if missing else [])
    return [next(others) if each is None else each for each in found]
