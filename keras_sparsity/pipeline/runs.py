"""Whole runs of a model whose stages live on the ranks."""

import keras

from keras_sparsity import collectives
from keras_sparsity._tf import patches
from keras_sparsity.callbacks import rank_zero
from keras_sparsity.callbacks.input_check import InputCheck
from keras_sparsity.data import distribution
from keras_sparsity.training.binding import Binding, bound_arguments


class Runs(Binding):
    """`fit`, `evaluate` and `predict` on all ranks; rank 0 reports.

    Args:
        model: an adopted model.
        steps: its `Steps`.
        weights: its `Weights`.
    """

    def __init__(self, model, steps, weights):
        self._steps, self._weights = steps, weights
        super().__init__(model, ["fit", "evaluate", "predict"])

    def fit(self, *args, **kwargs):
        with (
            rank_zero.Lines() as lines,
            patches.array_orders_change(distribution.next_order_seed()),
        ):
            return self._run("fit", args, kwargs, [lines])

    def evaluate(self, *args, **kwargs):
        return self._run("evaluate", args, kwargs)

    def predict(self, *args, **kwargs):
        return self._run("predict", args, kwargs)

    def _run(self, name, args, kwargs, first=()):
        arguments = bound_arguments(self._stock[name], args, kwargs)
        self._check_same_call(name, arguments)
        callbacks = arguments.get("callbacks")
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = keras.tree.flatten(
                [] if callbacks is None else callbacks
            )
            _check_callbacks(callbacks, self._model.distribute_strategy)
            arguments["callbacks"] = [
                *first,
                InputCheck(self._collectives),
                *rank_zero.on_rank(callbacks, self._collectives.rank),
            ]
        if self._collectives.rank != 0:
            arguments["verbose"] = 0
        with collectives.explained(f"model.{name}"):
            self._steps.settle()
            self._weights.part_random_states()
            return self._stock[name](**arguments)


def _check_callbacks(callbacks, strategy):
    for callback in callbacks:
        if type(callback).__module__.startswith("keras_sparsity."):
            raise ValueError(
                "The callbacks of this library look at the tables of "
                "`ks.HybridStrategy`. Received: a "
                f"{type(callback).__name__} under "
                f"`ks.{type(strategy).__name__}`. Use Keras's own, such as "
                "`keras.callbacks.ModelCheckpoint`."
            )
