"""Whole runs of a model whose stages live on the ranks."""

import contextlib
import functools

import keras

from keras_sparsity import collectives
from keras_sparsity._tf import contexts, keras_models, patches
from keras_sparsity.callbacks import ema_swap, rank_zero
from keras_sparsity.callbacks.input_check import InputCheck
from keras_sparsity.callbacks.sharded_checkpoint import ShardedCheckpoint
from keras_sparsity.callbacks.stopping import Stopping
from keras_sparsity.data import distribution
from keras_sparsity.pipeline.mixing_told import MixingTold
from keras_sparsity.training.binding import Binding, bound_arguments
from keras_sparsity.training.resuming import Input, checkpoint_last, resuming


class Runs(Binding):
    """`fit`, `evaluate` and `predict` on all ranks; rank 0 reports.

    And `test_on_batch` and `predict_on_batch`. `train_on_batch` is Keras's: a
    step of a training that goes on.
    """

    def __init__(self, model, steps, weights, updates):
        self._steps, self._weights = steps, weights
        self._updates = updates
        self._input = Input()
        super().__init__(
            model,
            [
                *("fit", "evaluate", "predict"),
                *("test_on_batch", "predict_on_batch"),
            ],
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
        self._steps.check_trains()  # also where no step is traced again
        with (
            resuming(self._model, callbacks, arguments) as checkpoint,
            rank_zero.Lines() as lines,
            self._choosing_by_logs(callbacks),
        ):
            self._input.awaited_by = checkpoint
            arguments["callbacks"] = [lines, *callbacks]
            return self._run("fit", arguments)

    def evaluate(self, *args, **kwargs):
        return self._run("evaluate", self._checked("evaluate", args, kwargs)[0])

    def predict(self, *args, **kwargs):
        return self._run("predict", self._checked("predict", args, kwargs)[0])

    def _on_batch(self, name, args, kwargs):
        with collectives.explained(f"model.{name}"):
            # The stages have the updates of the same mini-batches then.
            self._steps.end_passes()
            return self._stock[name](*args, **kwargs)

    def _checked(self, name, args, kwargs):
        """The arguments of a call, and the list of its callbacks."""
        arguments = bound_arguments(self._stock[name], args, kwargs)
        self._check_same_call(name, arguments)
        callbacks = arguments.get("callbacks")
        if name == "fit":
            self._check_batch_size(arguments.get("batch_size"))
        is_made = isinstance(callbacks, keras.callbacks.CallbackList)
        if is_made and name != "fit":  # to which a `fit` passes on its own
            return arguments, callbacks.callbacks
        callbacks = self._on_rank(rank_zero.listed(arguments))
        callbacks = [
            InputCheck(self._collectives),
            MixingTold(self._collectives, self._steps.mixing),
            *checkpoint_last([*callbacks, Stopping(self._collectives)]),
        ]
        arguments["callbacks"] = callbacks
        return arguments, callbacks

    @contextlib.contextmanager
    def _choosing_by_logs(self, callbacks):
        """While entered, no file is chosen by logs that are not known yet.

        Their losses of 0 would be the best ones.
        """
        with contextlib.ExitStack() as stack:
            for callback in callbacks:
                is_saver = isinstance(callback, keras.callbacks.ModelCheckpoint)
                if is_saver and callback.save_best_only:
                    method = self._of_known_logs(callback.on_train_batch_end)
                    replaced = contexts.own_attributes(
                        callback, on_train_batch_end=method
                    )
                    stack.enter_context(replaced)
            yield

    def _of_known_logs(self, method):
        def on_train_batch_end(batch, logs=None):
            if self._steps.shows_logs:
                method(batch, logs)

        return on_train_batch_end

    def _check_batch_size(self, size):
        number = self._model.distribute_strategy.asked_micro_batches
        if size is not None and number is not None and size < number:
            raise ValueError(
                "A mini-batch is divided into parts of an example at least. "
                f"Received: batch_size={size} and num_micro_batches={number}. "
                "Use a larger `batch_size`, or at most as many "
                "`num_micro_batches`."
            )

    def _on_rank(self, callbacks):
        """The callbacks of a list that this rank runs."""
        _check_callbacks(callbacks, self._model.distribute_strategy)
        ema_swap.show_stage(callbacks, self._updates.own_built)
        return rank_zero.on_rank(
            callbacks,
            self._collectives.rank,
            whole=self._whole,
        )

    def _whole(self, model):
        if model is not self._model:  # of a later `fit`
            return contextlib.nullcontext()
        return self._weights.shown_on_rank_zero()

    def _run(self, name, arguments):
        if self._collectives.rank != 0:
            arguments["verbose"] = 0
        with collectives.explained(f"model.{name}"):
            self._steps.end_passes()
            if name == "fit":
                self._steps.forget_logs()  # such as NaN, which would end it
            self._weights.part_random_states()
            read = functools.partial(
                distribution.for_steps,
                arguments.get("epochs", 1),
                are_counted=False,
            )
            with patches.epoch_iterators_are_made_in(read):
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
