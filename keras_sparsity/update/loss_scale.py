"""Loss scaling: all ranks update, or all skip the step."""

from keras_sparsity.placement import slices


def unscaled(rule, updates):
    """The updates, divided by the `loss_scale_factor` that a rule has.

    Keras divides in `apply`, when the gradients have been read.

    Args:
        rule: a Keras optimizer without a `LossScaleOptimizer` around it.
        updates: list of `Update`.
    """
    factor = rule.loss_scale_factor
    if factor is None:
        return updates
    return [
        update
        # Keras assigns such gradients as they are.
        if getattr(update.variable, "overwrite_with_gradient", False)
        else update.replaced(
            slices.mapped(lambda values: values / factor, update.gradient)
        )
        for update in updates
    ]


def apply_if_finite(optimizer, is_finite, updates, update):
    """Has a `LossScaleOptimizer` unscale gradients, and update or skip.

    Args:
        optimizer: the `LossScaleOptimizer`.
        is_finite: bool tensor, the same on all ranks.
        updates: list of `Update` with scaled gradients.
        update: function of the same list with unscaled gradients.
    """
    step = object.__new__(type(optimizer))
    step.__dict__.update(optimizer.__dict__)
    step.__dict__["check_finite"] = lambda grads: is_finite
    step.__dict__["inner_optimizer"] = _Unscaled(updates, update)
    step.apply([u.gradient for u in updates], [u.variable for u in updates])


class _Unscaled:
    """Stands in for the optimizer inside of a `LossScaleOptimizer`."""

    def __init__(self, updates, update):
        self._updates = updates
        self._update = update

    def apply(self, grads, trainable_variables=None):
        del trainable_variables
        self._update(
            [u.replaced(g) for g, u in zip(grads, self._updates, strict=True)]
        )
