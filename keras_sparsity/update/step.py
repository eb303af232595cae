"""A step of the inner optimizer, on gradients that all ranks have made one."""

import tensorflow as tf

from keras_sparsity._tf import keras_optimizers
from keras_sparsity.update import keeping, loss_scale, transform
from keras_sparsity.update import rows as row_update
from keras_sparsity.update.accumulate import accumulate
from keras_sparsity.update.clip import Clipping


class Step:
    """Unscales, transforms, accumulates and clips, then applies the rule.

    Args:
        inner: the inner optimizer.
        rule: the same, or the one inside of a `LossScaleOptimizer`.
        aggregation: `Aggregation` of the variables.
        placements: `Placements` of the step.
        transform_gradients: as of `HybridOptimizer`.
        updates_rows_of: function of a variable: whether only its touched rows
            are updated.
        kept: function of a variable: its `KeptRows`, or None.
    """

    def __init__(
        self,
        inner,
        rule,
        aggregation,
        placements,
        transform_gradients,
        updates_rows_of,
        kept,
    ):
        self._inner, self._rule = inner, rule
        self._aggregation, self._placements = aggregation, placements
        self._transform_gradients = transform_gradients
        self._updates_rows_of, self._kept = updates_rows_of, kept
        self._clipping = Clipping(placements.communicator, aggregation.spread)

    def apply(self, updates):
        """Applies a list of `Update`."""
        if self._inner is self._rule:
            self._update(updates)
        else:
            is_finite = self._clipping.is_finite(updates)
            loss_scale.apply_if_finite(
                self._inner, is_finite, updates, self._update
            )

    def _update(self, updates):
        if self._transform_gradients is not None:
            updates = self._aggregation.by_piece(
                transform.transform(self._transform_gradients, updates),
                self._updates_rows_of,
            )
        rule = self._rule
        if not updates:  # a rank that owns no row, of a model of tables only
            self._clipping.take_part(rule)
            keras_optimizers.iterations(rule).assign_add(1)
        elif rule.gradient_accumulation_steps and any(
            isinstance(u.gradient, tf.IndexedSlices) for u in updates
        ):
            accumulate(
                rule,
                updates,
                lambda variable: self._kept(variable).accumulator_of(variable),
                self._apply_rule,
            )
        else:
            self._apply_rule(rule, updates)

    def _apply_rule(self, rule, updates):
        row_update.apply(
            rule,
            updates,
            keeping.KeptUpdates(updates, self._kept),
            lambda grads: self._clipping.clip(rule, grads, updates),
            self._placements.strategy,
        )
