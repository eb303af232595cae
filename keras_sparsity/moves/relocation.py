"""Sends rows from the owners of one layout to those of another."""

import functools
import math

import numpy as np
import tensorflow as tf

from keras_sparsity._tf.current_variable import stored_rows
from keras_sparsity.collectives.engine import Route
from keras_sparsity.exchange.layout import Layout

# Of a table, sent at a time by all ranks together.
_BLOCK_BYTES = 1 << 22


def relocate(communicator, pieces, old, new, name):
    """The rows that this rank has by another layout.

    Every rank knows from the layouts which rows travel, and in which order,
    so that messages hold rows only. Rows that stay are copied. Memory holds
    `pieces`, the result and blocks of a few MiB.

    Args:
        pieces: variables, one for each partition of this rank by `old`: of a
            table, or of a kind of slot.
        old, new: `Layout` of the same rows, or None where every rank has the
            whole; not both.
        name: the call's role.

    Returns:
        List of tensors, one for each partition of this rank by `new`.
    """
    num_rows = (old or new).num_rows
    # The whole is one partition of one rank, as seen from that rank.
    whole = Layout(num_rows, num_partitions=1)
    row_shape, dtype = pieces[0].shape[1:], pieces[0].value.dtype
    stored = [num_rows]
    if new:
        owned = new.owned_partitions(communicator.rank)
        stored = [new.num_rows_of(partition) for partition in owned]
    found = [tf.zeros([count, *row_shape], dtype) for count in stored]
    row_bytes = math.prod(row_shape) * dtype.size
    count = max(1, _BLOCK_BYTES // max(row_bytes, 1))
    take = functools.partial(_take, pieces, old or whole)
    put = functools.partial(_put, found, new or whole)
    if not old:
        exchange = _keep
    else:
        exchange = _all_to_all if new else _gather
    for start in range(0, num_rows, count):
        ids = np.arange(start, min(start + count, num_rows))
        exchange(communicator, ids, old, new, take, put, name)
    return found


def _keep(communicator, ids, old, new, take, put, name):
    """Keeps the rank's part of a value that every rank has."""
    mine = ids[new.owner(ids).numpy() == communicator.rank]
    put(mine, take(mine))


def _gather(communicator, ids, old, new, take, put, name):
    """Gives every rank all rows."""
    before = old.owner(ids).numpy()
    mine = take(ids[before == communicator.rank])
    put(_by(before, ids), communicator.all_gather(mine, name=name))


def _all_to_all(communicator, ids, old, new, take, put, name):
    """Sends rows from owner to owner."""
    rank = communicator.rank
    before, after = old.owner(ids).numpy(), new.owner(ids).numpy()
    stay = ids[(before == rank) & (after == rank)]
    put(stay, take(stay))
    counts = np.zeros([communicator.size] * 2, np.int32)
    np.add.at(counts, (before, after), 1)
    np.fill_diagonal(counts, 0)
    if not counts.any():
        return
    goes = (before == rank) & (after != rank)
    comes = (before != rank) & (after == rank)
    route = (counts[rank], counts[:, rank], counts.max())
    rows = communicator.all_to_all_along(
        take(_by(after[goes], ids[goes])),
        Route(*map(tf.constant, route)),
        name=name,
    )
    put(_by(before[comes], ids[comes]), rows)


def _by(ranks, ids):
    """Ids by rank, those of each in their order."""
    return ids[np.argsort(ranks, kind="stable")]


def _take(pieces, layout, ids):
    """Rows of ids that are stored here."""
    slots, local_rows = layout.owned_index(ids).numpy(), layout.local_row(ids)
    positions = [np.flatnonzero(slots == s) for s in range(len(pieces))]
    return tf.dynamic_stitch(
        positions,
        [
            # As they are stored: they are up to date. Slots that would tell
            # so may be gone already.
            stored_rows(piece.value, local_rows[position])
            for piece, position in zip(pieces, positions, strict=True)
        ],
    )


def _put(tensors, layout, ids, rows):
    """Gives the tensors of this rank's partitions some of their rows."""
    slots, local_rows = layout.owned_index(ids).numpy(), layout.local_row(ids)
    for slot, tensor in enumerate(tensors):
        position = np.flatnonzero(slots == slot)
        if len(position):
            # In place, as this operation does it outside of functions. With
            # `scatter_update` on a variable, TensorFlow would copy it on each
            # later read (17 ms for 128 MB in place of 1), and so in each step
            # of a rule that updates the whole of it.
            tensors[slot] = tf.raw_ops.InplaceUpdate(
                x=tensor,
                i=local_rows[position].astype(np.int32),
                v=tf.gather(rows, position),
            )
