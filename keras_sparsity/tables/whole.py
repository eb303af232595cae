"""Whole tables: every rank calls these functions."""

import contextlib
import logging
import zlib

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import contexts
from keras_sparsity.tables.table_variable import storage, to_numpy

_logger = logging.getLogger(__name__)


def stored_rows(table):
    """This rank's rows of a spread table, partition by partition.

    Without a gradient to the table.
    """
    rows = [
        # A partition without rows holds a row of zeros.
        tf.stop_gradient(p.value if p.num_rows else p.value[:0])
        for p in table.partitions
    ]
    return tf.concat(rows, axis=0)


def tensor(table):
    """The whole of a table as a tensor, also inside of a step.

    Without a gradient to the table if that is spread: a model that trains it
    gathers rows.
    """
    if not table.is_sharded:
        return tf.convert_to_tensor(table.variable.value)
    gathered = table.collectives.all_gather(
        stored_rows(table), name=f"{table.role}/whole"
    )
    order = table.layout.stored_position(tf.range(table.num_rows))
    return tf.ensure_shape(
        tf.gather(gathered, order), [table.num_rows, table.dim]
    )


def tell_of_lookup(table, ids):
    """Says once what makes a lookup of all rows needless.

    Of tied weights, for example.

    Args:
        table: a spread `ShardedTable`, which notes that it was said.
        ids: integer tensor `(num_rows,)`.
    """
    if table.is_whole_lookup_told:
        return
    known = tf.get_static_value(ids)
    if known is None or not np.array_equal(known, np.arange(table.num_rows)):
        return
    table.is_whole_lookup_told = True
    if table.collectives.rank == 0:
        _logger.warning(
            "All %d rows of '%s' travel to every process in each step: the "
            "table is looked up whole, as for the logits of tied weights. "
            "`ks.layers.SampledSoftmax(%d, num_sampled, table=embedding)` "
            "needs the rows of a sample only.",
            table.num_rows,
            table.owner_name,
            table.num_rows,
        )


def collect(table):
    """Makes a table one that is not distributed, whole on every rank."""
    if table.is_sharded:
        table.variable.use(table.hold(None, [table.read()]))
    table.collectives = None
    table.place(None)


@contextlib.contextmanager
def in_one_piece(table, rows):
    """While entered, a spread table is one of this process alone.

    Args:
        table: the `ShardedTable`.
        rows: its whole array, as `read` gives it.
    """
    spread, placement = (table.collectives, table.partitions), table.placement
    anchor = table.variable.value
    table.collectives, table.partitions = None, []
    table.place(None)
    table.variable.use(storage(rows, table.variable))
    table.variable.regularizer = table.regularizer
    try:
        yield
    finally:
        table.collectives, table.partitions = spread
        table.place(placement)
        table.variable.use(anchor)
        table.variable.regularizer = table.regularizer


def read_like(table, pieces):
    """A whole array from pieces that are laid out like a table.

    Args:
        table: a spread `ShardedTable`.
        pieces: one variable for each of this rank's partitions, for example
            an optimizer's slots.

    Returns:
        Array `(num_rows, ...)`, on every rank.
    """
    layout = table.layout
    for announce in _announcers:
        announce(pieces)
    mine = np.concatenate(
        [
            to_numpy(piece)[: partition.num_rows]
            for piece, partition in zip(pieces, table.partitions, strict=True)
        ]
    )
    gathered = table.collectives.all_gather(
        tf.constant(mine), name=f"{table.role}/read"
    ).numpy()
    whole = np.empty((table.num_rows, *gathered.shape[1:]), gathered.dtype)
    owned = [layout.owned_rows(rank) for rank in sorted(layout.owners)]
    whole[np.concatenate(owned)] = gathered
    return whole


def assign_like(table, pieces, whole):
    """Gives pieces that are laid out like a table their values."""
    layout = table.layout
    owned = layout.owned_partitions(table.collectives.rank)
    whole = np.ascontiguousarray(whole)
    fingerprint = zlib.crc32(whole.reshape(-1).view(np.uint8))
    table.given[pieces[0].path] = fingerprint
    # A rank without a partition has one piece, without rows.
    for piece, partition in zip(pieces, owned, strict=False):
        rows = layout.rows_of(partition)
        if len(rows):
            piece.assign(whole[rows])


_announcers = []


def announcing(announce):
    """While entered, `announce(pieces)` comes before each `read_like`.

    For the rank that alone chooses the next table: the others wait to be
    told, so that all take part in the same reading.
    """
    return contexts.on_top(_announcers, announce)
