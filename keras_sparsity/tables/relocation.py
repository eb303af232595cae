"""Rows on their way from the owners of one layout to those of another."""

import math

import numpy as np
import tensorflow as tf

from keras_sparsity.collectives.engine import Route

# So much of a table is on the way at a time, all ranks together.
_BLOCK_BYTES = 1 << 22


def relocate(communicator, pieces, old, new, name):
    """The rows that this rank owns by another layout.

    Which rows travel from whom to whom, and in which order, every rank knows
    from the layouts: rows are sent, and nothing about them. Those that stay
    are copied here. Besides `pieces` and the result, blocks of a few MiB are
    in memory.

    Args:
        communicator: `Collectives`. All ranks call it together.
        pieces: variables, one for each partition of this rank by `old`: of a
            table, or of a kind of slot.
        old, new: `Layout` of the same rows.
        name: the call's role.

    Returns:
        List of tensors, one for each partition of this rank by `new`.
    """
    rank = communicator.rank
    row_shape, dtype = pieces[0].shape[1:], pieces[0].value.dtype
    found = [
        tf.zeros([new.num_rows_of(p), *row_shape], dtype)
        for p in new.owned_partitions(rank)
    ]
    row_bytes = math.prod(row_shape) * dtype.size
    count = max(1, _BLOCK_BYTES // max(row_bytes, 1))
    for start in range(0, old.num_rows, count):
        ids = np.arange(start, min(start + count, old.num_rows))
        before, after = old.owner(ids).numpy(), new.owner(ids).numpy()
        stay = ids[(before == rank) & (after == rank)]
        _put(found, new, stay, _take(pieces, old, stay))
        counts = np.zeros([communicator.size] * 2, np.int32)
        np.add.at(counts, (before, after), 1)
        np.fill_diagonal(counts, 0)
        if not counts.any():
            continue
        goes = (before == rank) & (after != rank)
        comes = (before != rank) & (after == rank)
        route = (counts[rank], counts[:, rank], counts.max())
        rows = communicator.all_to_all_along(
            _take(pieces, old, _by(after[goes], ids[goes])),
            Route(*map(tf.constant, route)),
            name=name,
        )
        _put(found, new, _by(before[comes], ids[comes]), rows)
    return found


def _by(ranks, ids):
    """Ids by rank, those of each in their order."""
    return ids[np.argsort(ranks, kind="stable")]


def _take(pieces, layout, ids):
    """Rows of ids that are stored here."""
    slots, local_rows = layout.slot(ids).numpy(), layout.local_row(ids)
    positions = [np.flatnonzero(slots == s) for s in range(len(pieces))]
    return tf.dynamic_stitch(
        positions,
        [
            # On the variable itself: reading it could copy it whole.
            tf.gather(piece.value, local_rows[position])
            for piece, position in zip(pieces, positions, strict=True)
        ],
    )


def _put(tensors, layout, ids, rows):
    """Gives the tensors of this rank's partitions some of their rows."""
    slots, local_rows = layout.slot(ids).numpy(), layout.local_row(ids)
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
