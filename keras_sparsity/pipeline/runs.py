"""Whole runs of a model whose stages live on the ranks."""

import keras

from keras_sparsity import collectives
from keras_sparsity._tf import keras_models
from keras_sparsity.callbacks import rank_zero
from keras_sparsity.callbacks.input_check import InputCheck
from keras_sparsity.callbacks.sharded_checkpoint import ShardedCheckpoint
from keras_sparsity.training.binding import Binding, bound_arguments
from keras_sparsity.training.resuming import Input, checkpoint_last, resuming


class Runs(Binding):
    """`fit`, `evaluate` and `predict` on all ranks; rank 0 reports.

    Args:
        model: an adopted model.
        steps: its `Steps`.
        weights: its `Weights`.
    """

    def __init__(self, model, steps, weights):
        self._steps, self._weights = steps, weights
        self._input = Input()
        super().__init__(
            model,
            ["fit", "evaluate", "predict"],
            {keras_models.SYMBOLIC_BUILD: "build"},
        )

    def build(self, iterator=None, data_batch=None):
        """Builds metrics from the shapes of a batch."""
        self._steps.check_compiled()
        if iterator is not None:
            data_batch = self._input.shapes(iterator)
        self._stock[keras_models.SYMBOLIC_BUILD](data_batch=data_batch)

    def fit(self, *args, **kwargs):
        arguments, callbacks = self._checked("fit", args, kwargs)
        with (
            resuming(self._model, callbacks, arguments) as checkpoint,
            rank_zero.Lines() as lines,
        ):
            self._input.awaited_by = checkpoint
            if callbacks is arguments["callbacks"]:
                arguments["callbacks"] = [lines, *callbacks]
            return self._run("fit", arguments)

    def evaluate(self, *args, **kwargs):
        return self._run("evaluate", self._checked("evaluate", args, kwargs)[0])

    def predict(self, *args, **kwargs):
        return self._run("predict", self._checked("predict", args, kwargs)[0])

    def _checked(self, name, args, kwargs):
        """The arguments of a call, and the list of its callbacks."""
        arguments = bound_arguments(self._stock[name], args, kwargs)
        self._check_same_call(name, arguments)
        callbacks = arguments.get("callbacks")
        strategy = self._model.distribute_strategy
        if isinstance(callbacks, keras.callbacks.CallbackList):
            if name == "fit":  # whose own passes on what it has been given
                _check_callbacks(callbacks.callbacks, strategy)
            return arguments, callbacks.callbacks
        callbacks = keras.tree.flatten([] if callbacks is None else callbacks)
        _check_callbacks(callbacks, strategy)
        callbacks = rank_zero.on_rank(
            callbacks,
            self._collectives.rank,
            whole=lambda model: self._weights.shown_on_rank_zero(),
        )
        callbacks = [
            InputCheck(self._collectives),
            *checkpoint_last(callbacks),
        ]
        arguments["callbacks"] = callbacks
        return arguments, callbacks

    def _run(self, name, arguments):
        if self._collectives.rank != 0:
            arguments["verbose"] = 0
        with collectives.explained(f"model.{name}"):
            self._steps.end_passes()
            self._weights.part_random_states()
            found = self._stock[name](**arguments)
            if name == "fit":  # before anybody reads weights of a tail
                self._steps.settle_columns()
            return found


def _check_callbacks(callbacks, strategy):
    for callback in callbacks:
        is_own = type(callback).__module__.startswith("keras_sparsity.")
        if is_own and not isinstance(callback, ShardedCheckpoint):
            raise ValueError(
                "Of the callbacks of this library all but `ShardedCheckpoint` "
                "look at the tables of `ks.HybridStrategy`. Received: a "
                f"{type(callback).__name__} under "
                f"`ks.{type(strategy).__name__}`. Use "
                "`ks.plan(model, dataset).write(log_dir)`, which writes the "
                "plan of the stages for TensorBoard, `ShardedCheckpoint`, or "
                "Keras's own callbacks, such as `keras.callbacks.TensorBoard`."
            )
