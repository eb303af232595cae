"""`fit` of a model whose variables are at servers."""

import itertools

import keras

from keras_sparsity import collectives
from keras_sparsity._tf import keras_models, keras_scopes, patches
from keras_sparsity.asynchronous.epochs import Epochs
from keras_sparsity.asynchronous.training import Training
from keras_sparsity.callbacks import rank_zero
from keras_sparsity.conversion import saving
from keras_sparsity.global_batch import metrics, random_states
from keras_sparsity.training import resuming
from keras_sparsity.training.binding import Binding, bound_arguments

# The same on all ranks, which train the same models.
_numbers = itertools.count()


class Runs(Binding):
    """Binds `fit` and its steps; rank 0 reports, and writes files.

    Args:
        model: an adopted model.
    """

    def __init__(self, model):
        self._training = self._epochs = None  # while `fit` runs
        self._is_in_step = False
        names = ["fit", "train_on_batch", "train_step", "get_metrics_result"]
        super().__init__(
            model,
            [*names, "save", "save_weights"],
            {keras_models.SYMBOLIC_BUILD: "build"},
        )

    def fit(self, *args, **kwargs):
        arguments = bound_arguments(self._stock["fit"], args, kwargs)
        self._check_same_call("fit", arguments)
        if arguments.get("steps_per_epoch"):
            raise ValueError(
                "An epoch is one pass over the data by all workers. Received: "
                f"steps_per_epoch={arguments['steps_per_epoch']} under "
                '`delay="bounded"`. Give `fit` a dataset of as many batches '
                "(`dataset.take(steps)`)."
            )
        self._epochs = Epochs(self._model.distribute_strategy)
        arguments["callbacks"] = [self._epochs, *self._callbacks(arguments)]
        if self._collectives.rank != 0:
            arguments["verbose"] = 0
        seed = resuming.next_order_seed()
        try:
            with (
                patches.array_orders_change(seed),
                collectives.explained("model.fit"),
            ):
                history = self._stock["fit"](**arguments)
                self._training.end()
            return history
        finally:
            # A function that was traced pushes to the servers of this `fit`.
            self._model.train_function = None
            if self._training is not None:
                self._training.release()
            self._training = self._epochs = None

    def _callbacks(self, arguments):
        callbacks = arguments.get("callbacks")
        if isinstance(callbacks, keras.callbacks.CallbackList):
            raise ValueError(
                'Under `delay="bounded"` `fit` takes callbacks as a list. '
                "Received: a CallbackList."
            )
        callbacks = keras.tree.flatten([] if callbacks is None else callbacks)
        for callback in callbacks:
            _check_callback(callback)
        callbacks = rank_zero.on_rank(callbacks, self._collectives.rank)
        return callbacks

    def build(self, iterator=None, data_batch=None):
        """Builds the model; `fit` then gives the variables to the servers."""
        begins = self._epochs is not None and self._training is None
        if begins:
            self._epochs.use(iterator)
        self._stock[keras_models.SYMBOLIC_BUILD](iterator, data_batch)
        if begins:
            self._training = Training(self._model, next(_numbers))
            self._epochs.begin(self._training)

    def train_on_batch(self, *args, **kwargs):
        raise ValueError(
            'Under `delay="bounded"` the workers share an epoch\'s batches. '
            "Received: `train_on_batch`. Use `fit`."
        )

    def train_step(self, data):
        rank = self._collectives.rank
        self._is_in_step = True
        try:
            with random_states.drawn_by_rank(rank), self._training.step():
                return self._stock["train_step"](data)
        finally:
            self._is_in_step = False

    def get_metrics_result(self):
        if (
            self._is_in_step
            or keras_scopes.in_symbolic_scope()
            or self._epochs is None
            or not self._epochs.ends()
        ):
            return self._stock["get_metrics_result"]()
        return metrics.global_results(
            self._model,
            self._collectives,
            self._stock["get_metrics_result"],
        )

    # Files.

    def save(self, *args, **kwargs):
        self._save("save", args, kwargs)

    def save_weights(self, *args, **kwargs):
        self._save("save_weights", args, kwargs)

    def _save(self, name, args, kwargs):
        self._check_same_call(name, {})
        with saving.on_rank_zero(self._model) as is_writer:
            if is_writer:
                self._stock[name](*args, **kwargs)

    def _check_optimizer(self):
        """The model's optimizer is Keras's own."""


def _check_callback(callback):
    is_own = type(callback).__module__.startswith("keras_sparsity.")
    save_freq = getattr(callback, "save_freq", "epoch")
    if is_own or save_freq != "epoch":
        within = f" with save_freq={save_freq}" if not is_own else ""
        raise ValueError(
            'Under `delay="bounded"` ranks take their own steps, and meet at '
            f"the ends of epochs. Received: a {type(callback).__name__}"
            f"{within}. Use callbacks of Keras that act at the end of an "
            "epoch, such as `keras.callbacks.ModelCheckpoint`."
        )
