"""Keras's `SwapEMAWeights`, which swaps all of a model's weights by itself."""

import functools

import keras


def show_rule(callbacks, model):
    """Has each `SwapEMAWeights` find the optimizer that keeps the averages.

    It looks through one optimizer around another, Keras's loss scaling; around
    that is a `HybridOptimizer`, which may have been replaced meanwhile.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            callback.set_model = functools.partial(_set_model, callback)
            callback.set_model(model)


def _set_model(callback, model):
    inner = getattr(model.optimizer, "inner_optimizer", None)
    is_scaling = isinstance(inner, keras.optimizers.LossScaleOptimizer)
    shown = _Shown(model, optimizer=inner) if is_scaling else model
    type(callback).set_model(callback, shown)


def show_stage(callbacks, variables):
    """Has each `SwapEMAWeights` swap the weights of this rank's stage.

    On Keras 3.5 it takes all of the model's.

    Args:
        variables: list of those that the optimizer has averages of.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.SwapEMAWeights):
            callback.set_model = functools.partial(
                _set_stage, callback, variables
            )


def _set_stage(callback, variables, model):
    shown = _Shown(model, trainable_variables=variables)
    type(callback).set_model(callback, shown)


class _Shown:
    """A model, some attributes of which are others."""

    def __init__(self, model, **attributes):
        self._shown_model = model
        vars(self).update(attributes)

    def __getattr__(self, name):
        return getattr(self._shown_model, name)
