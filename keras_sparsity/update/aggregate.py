"""Aggregates gradients: of all ranks, and one for each row."""

import tensorflow as tf

from keras_sparsity.exchange.owned_rows import split_gradient
from keras_sparsity.placement import slices
from keras_sparsity.placement.base import Update
from keras_sparsity.sparsity import touches


class Aggregation:
    """Aggregates the gradients of one model's variables.

    Args:
        variables: list of the model's variables.
        pieces: for each of them, the list of variables that the rule updates
            in its place: itself alone, or this rank's partitions of it.
        dense, sparse: `"mean"` or `"sum"`, for dense gradients and for
            gradients of rows, see `ks.HybridOptimizer`.

    References:
        EuroSys 3.1 (each gradient's path), 4.3 (post-aggregation operations).
    """

    def __init__(self, variables, pieces, dense="mean", sparse="mean"):
        self._places = {
            id(variable): (variable, of_variable)
            for variable, of_variable in zip(variables, pieces, strict=True)
        }
        # By whether a gradient is of rows.
        self._sums = {True: sparse == "sum", False: dense == "sum"}

    @property
    def places(self):
        """List of `(variable, pieces)`."""
        return list(self._places.values())

    @property
    def spread(self):
        """The variables of which this rank may hold no row at all."""
        return [v for v, pieces in self._places.values() if pieces[0] is not v]

    def pieces_of(self, variable):
        """The variables that the rule updates in its place, None if unknown."""
        return self._places.get(id(variable), (None, None))[1]

    def is_spread(self, variable):
        return self.pieces_of(variable)[0] is not variable

    def aggregate(self, grads, variables, placements, keeps_rows):
        """One gradient for each of the model's variables, of all ranks.

        Args:
            grads: list of this rank's gradients: tensors or
                `tf.IndexedSlices`; of a spread table, those of the rows that
                this rank owns, which have arrived already.
            variables: list of the model's variables they belong to.
            placements: `Placements` of the strategy.
            keeps_rows: function of a variable: whether only its touched rows
                may be updated.

        Returns:
            List of `Update`, in the same order. Rows may occur twice.
        """
        updates, reducers, by_reducer = [], {}, {}
        for gradient, variable in zip(grads, variables, strict=True):
            is_of_rows = isinstance(gradient, tf.IndexedSlices)
            update = Update(
                variable,
                gradient,
                variable,
                is_of_rows,
                is_of_rows and keeps_rows(variable),
            )
            # Variables that are reduced in one way share messages.
            kind = placements.of(variable).reducer(is_of_rows)
            if kind not in reducers:
                reducers[kind] = kind(
                    placements.communicator, placements.options
                )
            reducers[kind].begin(update)
            updates.append(update)
            by_reducer.setdefault(kind, []).append(update)
        for kind, of_reducer in by_reducer.items():
            reducers[kind].finish(of_reducer)
        of_rows = [(u.variable, *u.touched) for u in updates if u.is_of_rows]
        if of_rows:
            touches.end_step(of_rows)
        self._scale(updates, placements.communicator.num_workers)
        return updates

    def _scale(self, updates, size):
        """Multiplies by the number of workers, where users want sums."""
        for update in updates if size > 1 else ():
            if self._sums[update.is_of_rows]:
                # Each rank's loss has its share of the global batch already.
                update.gradient = tf.math.scalar_mul(size, update.gradient)

    def by_piece(self, updates, updates_rows_of):
        """The updates of pieces, with one gradient for each row.

        Args:
            updates: list of `Update`, one for each of the model's variables.
            updates_rows_of: function of a variable: whether only its touched
                rows are updated; else its gradient becomes dense.

        Returns:
            List of `Update`, one for each piece that has rows here.
        """
        pieces = []
        for update in updates:
            pieces += (
                _split(update) if self.is_spread(update.whole) else [update]
            )
        for piece in pieces:
            if isinstance(piece.gradient, tf.IndexedSlices):
                if updates_rows_of(piece.variable):
                    piece.gradient = slices.merged(piece.gradient)
                else:
                    num_rows = piece.variable.shape[0]
                    piece.gradient = slices.dense(piece.gradient, num_rows)
        return pieces


def merged(updates):
    """The same updates, with the gradients of duplicate rows summed."""
    return [
        update.replaced(slices.merged(update.gradient))
        if isinstance(update.gradient, tf.IndexedSlices)
        else update
        for update in updates
    ]


def _split(update):
    """The updates of this rank's partitions of a table."""
    table = update.whole.table
    return [
        Update(partition, gradient, update.whole, is_of_rows=True)
        for partition, gradient in zip(
            table.partitions,
            split_gradient(table, update.gradient),
            strict=True,
        )
        if partition.num_rows > 0
    ]
