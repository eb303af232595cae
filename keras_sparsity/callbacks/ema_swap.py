"""Keras's `SwapEMAWeights` where loss scaling is inside of the optimizer."""

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
    shown = _Scaling(model, inner) if is_scaling else model
    type(callback).set_model(callback, shown)


class _Scaling:
    """A model, with the loss scaling as the outermost of its optimizers."""

    def __init__(self, model, optimizer):
        self._shown_model = model
        self.optimizer = optimizer

    def __getattr__(self, name):
        return getattr(self._shown_model, name)
