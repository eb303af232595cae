"""Rows that a call asks for, from an object that foresees them."""

import contextlib

import tensorflow as tf

_sources = []


@contextlib.contextmanager
def by(source):
    """While entered, tables ask an object for rows before they pull them.

    Args:
        source: object with `rows(table, ids, columns, dtype)`, of the
            arguments of `ShardedTable.gather`: it returns the rows, or None.
    """
    _sources.append(source)
    try:
        yield
    finally:
        _sources.pop()


def is_entered():
    """Whether an object foresees rows."""
    return bool(_sources)


def rows(table, ids, columns, dtype):
    """The rows, or None if the table is to pull them."""
    if not _sources:
        return None
    return _sources[-1].rows(table, ids, columns, dtype)


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
