"""Rows that a call asks for, from an object that foresees them."""

import contextlib

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


def rows(table, ids, columns, dtype):
    """The rows, or None if the table is to pull them."""
    if not _sources:
        return None
    return _sources[-1].rows(table, ids, columns, dtype)
