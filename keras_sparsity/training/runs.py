"""Whole runs, and single batches, of an adopted model."""

import functools

import keras

from keras_sparsity import collectives
from keras_sparsity._tf import keras_input, keras_models, patches
from keras_sparsity.callbacks import (
    auto_architecture,
    ema_swap,
    partition_search,
    rank_zero,
)
from keras_sparsity.callbacks.architecture_logger import ArchitectureLogger
from keras_sparsity.callbacks.input_check import InputCheck
from keras_sparsity.callbacks.stopping import Stopping
from keras_sparsity.data import distribution, marks
from keras_sparsity.data.stand_ins import counted_part
from keras_sparsity.training import prefetching
from keras_sparsity.training.binding import RunBinding, bound_arguments
from keras_sparsity.training.resuming import checkpoint_last, resuming


class Runs(RunBinding):
    """`fit`, `evaluate` and `predict`, also on batches, on all ranks."""

    def __init__(self, model, first_step, replicas):
        self._first_step = first_step
        self._replicas = replicas
        self._auto = None  # from one `fit` to the next
        names = ["fit", "evaluate", "predict"]
        batches = ["train_on_batch", "test_on_batch", "predict_on_batch"]
        super().__init__(model, names + batches)

    def _check_call(self, method, arguments):
        """Raises if ranks call different methods, or have different models."""
        self._check_optimizer()
        self._check_same_call(method, arguments)
        if self._replicas.synchronised:  # else `FirstStep` compares them
            self._replicas.check(trains=method == "fit")

    def fit(self, *args, **kwargs):
        arguments = bound_arguments(self._stock["fit"], args, kwargs)
        self._check_call("fit", arguments)
        self._prepare_callbacks(arguments)
        callbacks = arguments["callbacks"]
        self._add_auto_architecture(callbacks)
        callbacks = getattr(callbacks, "callbacks", callbacks)
        for callback in callbacks:
            if isinstance(callback, ArchitectureLogger):
                callback.see(callbacks)
        with (
            resuming(self._model, callbacks, arguments) as checkpoint,
            rank_zero.Lines() as lines,
        ):
            self._first_step.input.awaited_by = checkpoint
            self._first_step.begins_fit = True
            if callbacks is arguments["callbacks"]:
                arguments["callbacks"] = [lines, *callbacks]
                return self._run("fit", arguments)
            # A `CallbackList` of the user's, with the bar that it may have.
            with lines.among(arguments["callbacks"]):
                return self._run("fit", arguments)

    def evaluate(self, *args, **kwargs):
        arguments = bound_arguments(self._stock["evaluate"], args, kwargs)
        if not kwargs.get(keras_models.IN_FIT):
            self._check_call("evaluate", arguments)
            self._prepare_callbacks(arguments)
        return self._run("evaluate", arguments)

    def predict(self, *args, **kwargs):
        arguments = bound_arguments(self._stock["predict"], args, kwargs)
        self._check_call("predict", arguments)
        self._prepare_callbacks(arguments)
        arguments["x"] = marks.in_order(arguments["x"])
        return self._run("predict", arguments)

    def _run(self, name, arguments):
        rank = self._collectives.rank
        if rank != 0:
            arguments["verbose"] = 0
        check = keras_input.check_executions
        with (
            patches.epoch_iterators_are_made_in(
                functools.partial(
                    distribution.for_steps, arguments.get("epochs", 1)
                ),
                check if self._collectives.size > 1 else None,
            ),
            collectives.explained(f"model.{name}"),
            prefetching.run_of_model(),
        ):
            return self._stock[name](**arguments)

    def _prepare_callbacks(self, arguments):
        """Gives a run the callbacks of this rank."""
        communicator, callbacks = self._collectives, arguments.get("callbacks")
        is_made = isinstance(callbacks, keras.callbacks.CallbackList)
        if is_made and communicator.size == 1:
            ema_swap.show_rule(callbacks.callbacks, self._model)
            return
        callbacks = rank_zero.listed(arguments)
        ema_swap.show_rule(callbacks, self._model)
        if communicator.size > 1:
            callbacks = [
                InputCheck(communicator),
                *rank_zero.on_rank(callbacks, communicator.rank),
                Stopping(communicator),
            ]
        callbacks = partition_search.arranged(callbacks, communicator.size)
        arguments["callbacks"] = checkpoint_last(callbacks)

    def _add_auto_architecture(self, callbacks):
        """Has `fit` find the architectures that are "auto"."""
        strategy = self._model.distribute_strategy
        is_asked_for = auto_architecture.is_asked_for(self._model, strategy)
        # No variable moves while gradients wait.
        may_move = self._collectives.size > 1 and strategy.synchronous
        if not (is_asked_for and may_move):
            return
        if self._auto is None:
            self._auto = auto_architecture.AutoArchitecture(
                self._model.distribute_strategy
            )
        searches = [
            callback
            for callback in callbacks
            if isinstance(callback, partition_search.PartitionSearch)
        ]
        self._auto.is_ready = lambda: not any(s.is_searching for s in searches)
        # First: it times the step alone.
        callbacks.insert(0, self._auto)

    # Single global batches.

    def train_on_batch(self, *args, **kwargs):
        strategy = self._model.distribute_strategy
        if strategy.prefetch and self._collectives.size > 1:
            why = "`train_on_batch` does not know the next batch, as `fit` does"
            prefetching.tell(self._model, why)
        return self._on_batch("train_on_batch", args, kwargs)

    def _on_batch(self, name, args, kwargs):
        self._check_optimizer(of_batch=True)
        arguments = bound_arguments(self._stock[name], args, kwargs)
        place = self._collectives.rank, self._collectives.num_workers
        for key in ("x", "y", "sample_weight"):
            if arguments.get(key) is None or self._collectives.size == 1:
                continue
            part = counted_part(arguments[key], *place)
            arguments[key] = part if key == "x" else part.batch
        with (
            collectives.explained(f"model.{name}"),
            prefetching.run_of_model(),
        ):
            return self._stock[name](**arguments)
