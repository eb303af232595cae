"""A step: gradients of all ranks become one, and a Keras rule applies them."""

import dataclasses
import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_optimizers
from keras_sparsity.collectives.base import Collectives
from keras_sparsity.exchange.layout import local_row_of
from keras_sparsity.placement import slices
from keras_sparsity.placement.base import Update
from keras_sparsity.sparsity import touches
from keras_sparsity.update import loss_scale, transform
from keras_sparsity.update import rows as row_update
from keras_sparsity.update.accumulate import accumulate


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
        # The variables of which this rank may hold no row at all.
        self.spread = [v for v, of_v in self.places if of_v[0] is not v]
        # By whether a gradient is of rows.
        self._sums = {True: sparse == "sum", False: dense == "sum"}

    @property
    def places(self):
        """List of `(variable, pieces)`."""
        return list(self._places.values())

    def pieces_of(self, variable):
        """The variables that the rule updates in its place, None if unknown."""
        return self._places.get(id(variable), (None, None))[1]

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
        updates, by_reducer = [], {}
        for gradient, variable in zip(grads, variables, strict=True):
            is_of_rows = isinstance(gradient, tf.IndexedSlices)
            update = Update(
                variable,
                gradient,
                variable,
                is_of_rows,
                is_of_rows and keeps_rows(variable),
            )
            updates.append(update)
            # Variables that are reduced in one way share messages.
            reducer = placements.of(variable).reducers[is_of_rows]
            by_reducer.setdefault(reducer, []).append(update)
        communicator = placements.communicator
        for reducer, of_reducer in by_reducer.items():
            reducer.reduce(of_reducer, communicator, placements.options)
        of_rows = [(u.variable, *u.touched) for u in updates if u.is_of_rows]
        if of_rows:
            touches.end_step(of_rows)
        size = communicator.num_workers
        for update in updates if size > 1 else ():
            if self._sums[update.is_of_rows]:
                # Each rank's loss has its share of the global batch already.
                update.gradient = tf.math.scalar_mul(size, update.gradient)
        return updates

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
            is_whole = self.pieces_of(update.whole)[0] is update.whole
            pieces += [update] if is_whole else _split(update)
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
        update.replaced(slices.merged(update.gradient)) for update in updates
    ]


def _split(update):
    """The updates of this rank's partitions of a table, by local row."""
    table, gradient = update.whole.table, update.gradient
    ids = tf.cast(gradient.indices, tf.int64)
    rows = [local_row_of(ids, table.layout.num_partitions)]
    values, count = [gradient.values], len(table.partitions)
    if count > 1:
        slots = table.layout.owned_index(ids)
        rows = tf.dynamic_partition(rows[0], slots, count)
        values = tf.dynamic_partition(values[0], slots, count)
    gradients = [
        tf.IndexedSlices(value, row, tf.constant(list(p.shape), tf.int64))
        for p, row, value in zip(table.partitions, rows, values, strict=True)
    ]
    return [
        Update(partition, gradient, update.whole, is_of_rows=True)
        for partition, gradient in zip(table.partitions, gradients, strict=True)
        if partition.num_rows > 0
    ]


@dataclasses.dataclass(frozen=True)
class Clipping:
    """Clips as a Keras optimizer is told to, after aggregation.

    Args:
        communicator: `Collectives` of all ranks.
        spread: list of the variables of which each rank holds a part only.

    References:
        EuroSys 4.3; arXiv 5.3.2.
    """

    communicator: Collectives
    spread: list[keras.Variable]

    def clip(self, rule, grads, updates):
        """The clipped gradients.

        Args:
            rule: the Keras optimizer.
            grads: list of tensors, the values to clip.
            updates: list of the `Update` of each.

        Returns:
            List of tensors.
        """
        if rule.clipvalue and rule.clipvalue > 0:
            limit = rule.clipvalue
            return [tf.clip_by_value(g, -limit, limit) for g in grads]
        if rule.clipnorm and rule.clipnorm > 0:
            squares = self.squared_norms(grads, updates)
            return [
                _scale_to(g, squares[id(u.whole)], rule.clipnorm)
                for g, u in zip(grads, updates, strict=True)
            ]
        if rule.global_clipnorm and rule.global_clipnorm > 0:
            squares = self.squared_norms(grads, updates)
            total = tf.add_n(list(squares.values()))
            return [
                _scale_to(g, total, rule.global_clipnorm, is_global=True)
                for g in grads
            ]
        return grads

    def squared_norms(self, grads, updates):
        """Squared norm of each model variable's gradient, over all owners.

        Returns:
            Dictionary from the `id` of each of the model's variables.
        """
        wide = _wide([*grads, *self.spread])
        squares = {id(v): tf.zeros([], wide) for v in self.spread}
        for gradient, update in zip(grads, updates, strict=True):
            square = tf.reduce_sum(tf.square(tf.cast(gradient, wide)))
            key = id(update.whole)
            squares[key] = squares[key] + square if key in squares else square
        spread = [id(v) for v in self.spread]
        if spread and self.communicator.size > 1:
            # One number for each table, all in one message (EuroSys 4.3).
            sent = tf.stack([squares[key] for key in spread])
            (summed,) = self.communicator.all_reduce(
                [tf.cast(sent, _wide(self.spread))], name="optimizer/norms"
            )
            summed = tf.unstack(tf.cast(summed, wide))
            squares.update(zip(spread, summed, strict=True))
        return squares

    def take_part(self, rule):
        """Sends the norms of a rank that owns no row, as the others do."""
        if rule.clipnorm or rule.global_clipnorm:
            steps = rule.gradient_accumulation_steps or 1
            tf.cond(
                (keras_optimizers.iterations(rule).value + 1) % steps == 0,
                lambda: tf.add_n(list(self.squared_norms([], []).values())),
                lambda: tf.zeros([], _wide(self.spread)),
            )

    def is_finite(self, updates):
        """Whether all gradients are finite on all ranks: a bool tensor."""
        finite = tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(u.values)) for u in updates]
        )
        if self.communicator.size > 1 and self.spread:
            (votes,) = self.communicator.all_reduce(
                [tf.cast(finite, tf.int32)], op="min", name="optimizer/finite"
            )
            finite = votes > 0
        return finite


def _wide(tensors):
    """The dtype of sums over tensors, or variables, or of their messages."""
    are_double = any(tf.as_dtype(x.dtype) == tf.float64 for x in tensors)
    return tf.float64 if are_double else tf.float32


def _scale_to(gradient, squared_norm, limit, is_global=False):
    norm = tf.sqrt(squared_norm)
    scale = limit / tf.maximum(norm, limit)
    if is_global:
        scale += norm - norm  # of an infinite one all is NaN, as in Keras
    return gradient * tf.cast(scale, gradient.dtype)


@dataclasses.dataclass(frozen=True)
class Step:
    """Unscales, transforms, accumulates and clips, then applies the rule.

    Args:
        inner: the inner optimizer.
        rule: the same, or the one inside of a `LossScaleOptimizer`.
        aggregation: `Aggregation` of the variables.
        clipping: `Clipping` of the gradients.
        strategy: the `tf.distribute.Strategy` that updates variables.
        transform_gradients: as of `HybridOptimizer`.
        updates_rows_of: function of a variable: whether only its touched rows
            are updated.
        kept: function of a variable: its `KeptRows`, or None.
    """

    inner: keras.optimizers.Optimizer
    rule: keras.optimizers.Optimizer
    aggregation: Aggregation
    clipping: Clipping
    strategy: tf.distribute.Strategy
    transform_gradients: Callable | None
    updates_rows_of: Callable
    kept: Callable

    def apply(self, updates):
        """Applies a list of `Update`."""
        if self.inner is self.rule:
            self._update(updates)
        else:
            is_finite = self.clipping.is_finite(updates)
            loss_scale.apply_if_finite(
                self.inner, is_finite, updates, self._update
            )

    def _update(self, updates):
        if self.transform_gradients is not None:
            updates = self.aggregation.by_piece(
                transform.transform(self.transform_gradients, updates),
                self.updates_rows_of,
            )
        rule = self.rule
        if not updates:  # a rank that owns no row, of a model of tables only
            self.clipping.take_part(rule)
            keras_optimizers.advance_without_variables(rule)
        elif rule.gradient_accumulation_steps and any(
            isinstance(u.gradient, tf.IndexedSlices) for u in updates
        ):
            accumulate(
                rule,
                updates,
                lambda variable: self.kept(variable).accumulator_of(variable),
                functools.partial(row_update.apply, self),
            )
        else:
            row_update.apply(self, rule, updates)
