"""`fit` of a model whose variables are at servers."""

import collections
import contextlib
import itertools

import keras
import numpy as np

from keras_sparsity import collectives
from keras_sparsity._tf import (
    contexts,
    custom_gradients,
    keras_input,
    keras_models,
    patches,
)
from keras_sparsity.asynchronous import joiners, meeting
from keras_sparsity.asynchronous.epochs import Epochs
from keras_sparsity.asynchronous.training import Training
from keras_sparsity.callbacks import rank_zero
from keras_sparsity.callbacks.architecture_logger import ArchitectureLogger
from keras_sparsity.callbacks.sharded_checkpoint import ShardedCheckpoint
from keras_sparsity.callbacks.stopping import Stopping
from keras_sparsity.conversion import saving
from keras_sparsity.global_batch import metrics, random_states
from keras_sparsity.health import watch
from keras_sparsity.training import resuming
from keras_sparsity.training.binding import (
    RunBinding,
    bound_arguments,
    raise_of_compiled_outside,
)

# The same on all ranks, which train the same models.
_numbers = itertools.count()


class _Traces:
    """Lives as long as the functions that a `fit` traces."""


class Runs(RunBinding):
    """Binds `fit` and its steps; rank 0 reports, and writes files.

    Attributes:
        optimizer: that of the last `compile` inside of the scope.
    """

    optimizer = None

    def __init__(self, model):
        # While `fit` runs.
        self._training = self._epochs = self._traces = None
        self._results = None  # of all workers, while an epoch ends
        names = ["fit", "train_on_batch", "train_step", "get_metrics_result"]
        names += ["evaluate", "predict", "test_on_batch", "predict_on_batch"]
        super().__init__(
            model,
            [*names, "save", "save_weights", "export"],
            {
                keras_models.SYMBOLIC_BUILD: "build",
                keras_models.RESULTS_OR_LOGS: "results_or_logs",
            },
        )

    def fit(self, *args, **kwargs):
        arguments = bound_arguments(self._stock["fit"], args, kwargs)
        self._check_optimizer()
        self._check_same_call("fit", arguments)
        self._traces = _Traces()
        try:
            return self._fit(arguments)
        except BaseException as error:
            # Its program may catch it, and the others would wait for it.
            watch.leave(error)
            raise
        finally:
            # A function that was traced pushes to the servers of this `fit`.
            self._model.train_function = None
            self._training = self._epochs = self._traces = None

    def _fit(self, arguments):
        if arguments.get("steps_per_epoch"):
            raise ValueError(
                "An epoch is one pass over the data by all workers. Received: "
                f"steps_per_epoch={arguments['steps_per_epoch']} under "
                '`delay="bounded"`. Give `fit` a dataset of as many batches '
                "(`dataset.take(steps)`)."
            )
        callbacks = self._callbacks(arguments)
        if self._collectives.rank != 0:
            arguments["verbose"] = 0
        self._number, of_fit = next(_numbers), (callbacks, arguments)
        with (
            joiners.begun(self._model, *of_fit, self._number) as begun,
            collectives.explained("model.fit"),
        ):
            checkpoint, num_read = begun
            self._epochs = Epochs(
                self._model.distribute_strategy,
                checkpoint,
                joiners.Progress(self._model, callbacks),
                num_read,
            )
            arguments["callbacks"] = [self._epochs, *callbacks]
            refuse = self._epochs.refuse_assigned
            try:
                with patches.assignments_are_told(refuse):
                    history = self._stock["fit"](**arguments)
                self._training.end()
            except BaseException:
                if self._training is not None:
                    self._training.give_up()
                raise
            self._training.worker.release(raises=True)
        return history

    def _callbacks(self, arguments):
        if isinstance(arguments.get("callbacks"), keras.callbacks.CallbackList):
            raise ValueError(
                'Under `delay="bounded"` `fit` takes callbacks as a list. '
                "Received: a CallbackList."
            )
        callbacks = rank_zero.listed(arguments)
        for callback in callbacks:
            _check_callback(callback)
        callbacks = self._on_rank(callbacks)
        # A checkpoint saves whether all stop.
        callbacks.append(Stopping(self._collectives, is_in_steps=False))
        return resuming.checkpoint_last(callbacks)

    def build(self, iterator=None, data_batch=None):
        """Builds the model; `fit` then gives the variables to the servers."""
        begins = self._epochs is not None and self._training is None
        if begins:
            self._epochs.use(iterator)
        if iterator is not None and keras_input.knows_ranks(iterator):
            # Without reading a batch: a server has no input.
            iterator, data_batch = None, keras_input.batch_shapes(iterator)
        self._stock[keras_models.SYMBOLIC_BUILD](iterator, data_batch)
        if begins:
            self._training = Training(self._model, self._number)
            self._epochs.begin(self._training)

    def train_on_batch(self, *args, **kwargs):
        raise ValueError(
            'Under `delay="bounded"` the workers share an epoch\'s batches. '
            "Received: `train_on_batch`. Use `fit`."
        )

    def train_step(self, data):
        with random_states.drawn_by_rank(self._collectives.rank):
            step = self._stock["train_step"]
            logs = self._training.worker.step(step, data)
        custom_gradients.forget_with(self._traces)
        return logs

    def get_metrics_result(self):
        if self._results is not None:
            return self._results
        return self._stock["get_metrics_result"]()

    def results_or_logs(self, logs):
        """Ends an epoch: `fit` calls this behind the epoch's last step."""
        stock, records = self._stock[keras_models.RESULTS_OR_LOGS], []
        if self._is_in_epoch():  # not in the validation behind it
            records = self._epochs.end()
        results = self._results_of(records) if records else None
        if results is None:
            return stock(logs)
        logs = {**self._training.logs, **_mean_logs(records)}
        if all(set(each["names"]) == set(results) for each in records):
            logs = results  # A rank without a batch has no vectors of its own.
        with contexts.attribute(self, "_results", results):
            return stock(logs)

    def _results_of(self, records):
        """The results of all workers' metrics, on each rank.

        None if those who have their variables are lost meanwhile: some metrics
        make them when they are updated, which is not done on a server, or on a
        worker without a batch.
        """
        parts = [each["metrics"] for each in records]
        own, results = metrics.sent(self._model.metrics), None
        if len(own) == len(parts[0]):
            results = metrics.results_of_parts(
                *(self._model.metrics, parts),
                self._stock["get_metrics_result"],
            )
        if self._training.has_all_metrics:
            return results
        if results is not None:
            told = keras.ops.convert_to_numpy, results
            results = keras.tree.map_structure(*told)
        gather = self._collectives.gather_objects
        found = gather(results, "asynchronous/metrics")
        return next((each for each in found if each is not None), None)

    def _is_in_epoch(self):
        return self._epochs is not None and self._epochs.is_running

    def evaluate(self, *args, **kwargs):
        return self._on_workers("evaluate", args, kwargs)

    def predict(self, *args, **kwargs):
        return self._on_workers("predict", args, kwargs)

    def _on_batch(self, name, args, kwargs):
        self._check_has_weights(name)
        return self._stock[name](*args, **kwargs)

    def _check_has_weights(self, name):
        """Raises ValueError within an epoch, when servers have the weights."""
        if self._is_in_epoch():
            _raise_of_epoch(name, ", or give `fit` `validation_data`")

    def _on_workers(self, name, args, kwargs):
        """The results of the first worker; a server has no input.

        By results of their own, callbacks on the workers would decide
        differently. Predictions, which are large, travel to servers alone.
        """
        self._check_has_weights(name)
        is_own = name == "predict" and not self._collectives.num_servers
        if self._collectives.size == 1 or is_own:
            return self._own_results(name, args, kwargs)
        if self._collectives.is_server and meeting.joining(self._collectives):
            raise RuntimeError(
                f"A server that was started anew has no results of `{name}` "
                f"before `fit`. Received: `{name}` before it. Call it after "
                "the last `fit`."
            )
        rank, gather = self._collectives.rank, self._collectives.gather_objects
        results, found = None, []
        if not self._collectives.is_server:
            results = self._own_results(name, args, kwargs)
        while not found:  # Again, if that worker is lost meanwhile.
            is_first = rank == min(gather(rank, f"asynchronous/{name}/from"))
            sent = gather(results if is_first else None, f"asynchronous/{name}")
            found = [each for each in sent if each is not None]
        return found[0]

    def _own_results(self, name, args, kwargs):
        arguments = bound_arguments(self._stock[name], args, kwargs)
        callbacks, rank = arguments.get("callbacks"), self._collectives.rank
        if rank != 0:
            arguments["verbose"] = 0
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            arguments["callbacks"] = self._on_rank(rank_zero.listed(arguments))
        return self._stock[name](**arguments)

    def _on_rank(self, callbacks):
        """Without messages, which a lost rank 0 would owe the others.

        Between epochs each rank has all weights.
        """
        rank = self._collectives.rank
        if self._collectives.size == 1:
            return callbacks
        return rank_zero.on_rank(
            callbacks, rank, whole=lambda _: contextlib.nullcontext(rank == 0)
        )

    def export(self, *args, **kwargs):
        self._save("export", args, kwargs)

    def _save(self, name, args, kwargs):
        if meeting.joining(self._collectives):
            return  # The others have, or will.
        # In `on_epoch_begin` all have the weights.
        if self._epochs is not None and self._epochs.is_in_steps:
            _raise_of_epoch(name)
        self._check_same_call(name, {})
        rank, error, first = self._collectives.rank, None, None

        def told():
            value = rank, error is not None
            gather = self._collectives.gather_objects
            return dict(gather(value, "asynchronous/save"))

        # Again, if the rank that wrote it is lost.
        while first not in (failed := told()):
            first = min(failed)
            if rank == first:
                try:
                    saving.write(self._stock[name], args, kwargs)
                except Exception as failure:
                    error = failure
        if error is not None:
            raise error
        if failed[first]:
            raise RuntimeError(
                f"Rank {first} failed while it saved the model; its own error "
                "says why."
            )

    def _check_optimizer(self):
        """The model's optimizer is Keras's own, compiled in the scope."""
        if self._model.optimizer is not self.optimizer:
            raise_of_compiled_outside(self._model)


def _raise_of_epoch(name, instead=""):
    raise ValueError(
        "Within an epoch a worker has neither the other workers' last updates "
        "nor all rows, and ranks take their own steps. Received: "
        f'`model.{name}` within an epoch under `delay="bounded"`. Call it in '
        f"`on_epoch_end`, on every rank{instead}."
    )


def _mean_logs(records):
    """The means of the workers' last logs, also where no step has run."""
    logs = collections.defaultdict(list)
    for record in records:
        for name, value in record["logs"].items():
            logs[name].append(value)
    return {name: float(np.mean(values)) for name, values in logs.items()}


def _check_callback(callback):
    within = [
        f"{name}={value!r}"
        for kind, name in (
            (keras.callbacks.ModelCheckpoint, "save_freq"),
            (ShardedCheckpoint, "every_steps"),
            (ShardedCheckpoint, "every_seconds"),
        )
        if isinstance(callback, kind)
        if (value := getattr(callback, name)) not in (None, "epoch")
    ]
    is_own = any(
        kind.__module__.startswith("keras_sparsity.")
        for kind in type(callback).__mro__
    )
    meets = isinstance(callback, (ArchitectureLogger, ShardedCheckpoint))
    if within or (is_own and not meets):
        raise ValueError(
            'Under `delay="bounded"` ranks take their own steps, and meet at '
            f"the ends of epochs. Received: a {type(callback).__name__}"
            f"{' with ' * bool(within)}{', '.join(within)}. Use callbacks that "
            "act at the end of an epoch, such as `keras.callbacks."
            "ModelCheckpoint` and `ks.callbacks.ShardedCheckpoint`."
        )
