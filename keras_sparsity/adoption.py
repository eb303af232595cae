"""Makes a compiled Keras model train over all processes.

`strategy.scope()` replaces `Model.compile` for as long as it is entered; what
is compiled meanwhile is *adopted*: its optimizer and losses are wrapped, its
tables spread, and the methods through which Keras trains, evaluates, predicts
and saves are bound, on this model alone, to versions that involve all ranks.
"""

import contextlib
import functools
import inspect

import keras
import tensorflow as tf

from keras_sparsity import (
    agreement,
    collectives,
    compat,
    empty_parts,
    losses,
    metrics,
    random_states,
    saving,
)
from keras_sparsity.callbacks import rank_zero, sharded_checkpoint
from keras_sparsity.callbacks.input_check import InputCheck
from keras_sparsity.data import distribution
from keras_sparsity.data.batches import split_batch
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.optimizer_arguments import get
from keras_sparsity.tables.table_variable import TableVariable

# Set on an adopted model; holds its `Adoption`.
_ADOPTION = "_keras_sparsity_adoption"
_EVERY_RANK = (
    "Every rank must make the same calls; `ks.export(model)` gives a model "
    "that one rank can use by itself."
)


@contextlib.contextmanager
def compile_adopts(strategy):
    """While entered, `Model.compile` adopts the model it compiles."""
    owner = next(c for c in keras.Model.__mro__ if "compile" in vars(c))
    original = owner.compile

    @functools.wraps(original)
    def compile(model, *args, **kwargs):
        arguments = _bound_arguments(original, (model, *args), kwargs)
        del arguments["self"]
        optimizer = arguments.get("optimizer", "rmsprop")
        if optimizer is not None:
            arguments["optimizer"] = wrap(optimizer, strategy)
        arguments["loss"] = losses.globalize(
            arguments.get("loss"), strategy.collectives
        )
        adopt(model, strategy)
        original(model, **arguments)
        compiled_metrics = compat.compiled_metrics(model)
        if compiled_metrics is not None and strategy.size > 1:
            metrics.ignore_empty_parts(compiled_metrics)
        if getattr(model, "optimizer", None) is not None:
            model.optimizer = wrap(model.optimizer, strategy)

    owner.compile = compile
    try:
        yield
    finally:
        owner.compile = original


def wrap(optimizer, strategy):
    """The optimizer as a `HybridOptimizer`, outermost."""
    options = strategy.optimizer_options
    optimizer = get(optimizer)
    if not isinstance(optimizer, HybridOptimizer):
        inner = getattr(optimizer, "inner_optimizer", None)
        if not isinstance(inner, HybridOptimizer):
            return HybridOptimizer(optimizer, **options)
        optimizer = _nested(optimizer)
    # One that was loaded has none: functions are not saved.
    given = options["transform_gradients"]
    if optimizer.transform_gradients is None:
        optimizer.transform_gradients = given
    elif given not in (None, optimizer.transform_gradients):
        raise ValueError(
            "The strategy and the optimizer have different "
            "`transform_gradients`. Give it to one of them. Received: "
            f"{given} and {optimizer.transform_gradients}."
        )
    return optimizer


def _nested(loss_scaling):
    """Moves the loss scaling around a `HybridOptimizer` inside of it.

    Keras's `compile` adds it outermost. There, each rank would look for
    overflow in its own gradients only: one rank would skip the step while the
    others wait for it.
    """
    hybrid = loss_scaling.inner_optimizer
    if isinstance(hybrid.inner_optimizer, keras.optimizers.LossScaleOptimizer):
        return hybrid  # scaled already, by the user or when it was saved
    loss_scaling.inner_optimizer = hybrid.inner_optimizer
    return HybridOptimizer(loss_scaling, **hybrid.options())


def adopt(model, strategy):
    """Binds a model's methods to versions that involve all ranks."""
    compat.set_distribute_strategy(model, strategy)
    for table in saving.tables_of(model):
        table.shard(strategy.collectives)
    if getattr(model, _ADOPTION, None) is None:
        object.__setattr__(model, _ADOPTION, Adoption(model))


class Adoption:
    """The bound methods of one adopted model."""

    def __init__(self, model):
        self._model = model
        self._stock = {}
        self._is_in_step = False
        self._is_in_keras_loss = False
        self._synchronised = None
        self._folded = set()
        self._awaits_input = None
        for name in (
            "fit",
            "evaluate",
            "predict",
            "train_on_batch",
            "test_on_batch",
            "predict_on_batch",
            "call",
            "train_step",
            "test_step",
            "predict_step",
            "get_metrics_result",
            "make_train_function",
            "make_test_function",
            "make_predict_function",
            "get_compile_config",
            "_maybe_symbolic_build",
            "save",
            "save_weights",
        ):
            self._bind(name)
        if not compat.losses_are_scaled():
            self._bind("compute_loss")
        elif type(model).compute_loss is keras.Model.compute_loss:
            self._bind("compute_loss")
            self._bind("_compute_loss")

    @property
    def _collectives(self):
        return self._model.distribute_strategy.collectives

    def _bind(self, name):
        stock = getattr(self._model, name)
        self._stock[name] = stock
        method = getattr(self, name)

        @functools.wraps(stock)
        def bound(*args, **kwargs):
            return method(*args, **kwargs)

        # Not through Keras's attribute tracking: these are not state.
        object.__setattr__(self._model, name, bound)

    def _check_call(self, method, arguments):
        """Raises where ranks call different methods, or with a wrong model."""
        self._check_optimizer()
        self._check_same_call(method, arguments)

    def _check_same_call(self, method, arguments):
        if self._collectives.size == 1:
            return
        facts = agreement.of_call(method, arguments)
        if method == "fit":
            facts.update(agreement.of_model(self._model))
        self._collectives.check_equal(
            facts, "The model and its method that is called", _EVERY_RANK
        )

    def _check_optimizer(self):
        optimizer = getattr(self._model, "optimizer", None)
        if optimizer is not None and not isinstance(optimizer, HybridOptimizer):
            raise ValueError(
                f"The model '{self._model.name}' trains over "
                f"{self._collectives.size} processes, but its optimizer is "
                f"not wrapped, so its gradients would not be aggregated. "
                f"Received: {optimizer}. Write "
                "`with strategy.scope(): model.compile(...)`, or "
                "`model.optimizer = ks.HybridOptimizer(optimizer)`."
            )

    # Whole runs.

    def fit(self, *args, **kwargs):
        arguments = _bound_arguments(self._stock["fit"], args, kwargs)
        self._check_call("fit", arguments)
        callbacks = self._callbacks(arguments.get("callbacks"))
        arguments["callbacks"] = callbacks
        order_seed = distribution.next_order_seed()
        callbacks = getattr(callbacks, "callbacks", callbacks)
        checkpoint = sharded_checkpoint.among(callbacks)
        if checkpoint:
            arguments["initial_epoch"] = checkpoint.begin(
                self._model, callbacks, arguments
            )
            order_seed = checkpoint.order_seed(order_seed)
        self._awaits_input = checkpoint
        with compat.array_orders_change(order_seed):
            return self._run("fit", arguments)

    def evaluate(self, *args, **kwargs):
        arguments = _bound_arguments(self._stock["evaluate"], args, kwargs)
        if not kwargs.get("_use_cached_eval_dataset"):
            self._check_call("evaluate", arguments)
        return self._run("evaluate", arguments)

    def predict(self, *args, **kwargs):
        arguments = _bound_arguments(self._stock["predict"], args, kwargs)
        self._check_call("predict", arguments)
        return self._run("predict", arguments)

    def _run(self, name, arguments):
        rank = self._collectives.rank
        if rank != 0:
            arguments["verbose"] = 0
        if name != "fit":
            callbacks = self._callbacks(arguments.get("callbacks"))
            arguments["callbacks"] = callbacks
        with collectives.explained(f"model.{name}"):
            return self._stock[name](**arguments)

    def _callbacks(self, callbacks):
        communicator = self._collectives
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
        callbacks = rank_zero.on_rank(callbacks, communicator.rank)
        if communicator.size > 1:
            callbacks = [InputCheck(communicator), *callbacks]
        # What it saves includes what the others do.
        return sorted(
            callbacks,
            key=lambda c: isinstance(c, sharded_checkpoint.ShardedCheckpoint),
        )

    # Single batches: global ones, too.

    def train_on_batch(self, *args, **kwargs):
        return self._on_batch("train_on_batch", args, kwargs)

    def test_on_batch(self, *args, **kwargs):
        return self._on_batch("test_on_batch", args, kwargs)

    def predict_on_batch(self, *args, **kwargs):
        return self._on_batch("predict_on_batch", args, kwargs)

    def _on_batch(self, name, args, kwargs):
        self._check_optimizer()
        arguments = _bound_arguments(self._stock[name], args, kwargs)
        communicator = self._collectives
        for key in ("x", "y", "sample_weight"):
            if arguments.get(key) is not None:
                arguments[key] = split_batch(
                    arguments[key], communicator.rank, communicator.size
                )
        with collectives.explained(f"model.{name}"):
            return self._stock[name](**arguments)

    # Steps.

    def call(self, *args, **kwargs):
        stock = self._stock["call"]
        if self._is_in_step and args and self._collectives.size > 1:
            return empty_parts.call(stock, *args, **kwargs)
        return stock(*args, **kwargs)

    def _compute_loss(self, *args, **kwargs):
        """What Keras's own steps call."""
        self._is_in_keras_loss = True
        try:
            return self._stock["_compute_loss"](*args, **kwargs)
        finally:
            self._is_in_keras_loss = False

    def compute_loss(self, *args, **kwargs):
        """The loss, with a gradient that the ranks' sum makes whole.

        Keras 3.6 and later divides the value by the number of replicas too,
        and multiplies it again in its own steps. A step of the user's own,
        which does not, gets it undivided.
        """
        if not compat.losses_are_scaled():
            return self._unscaled_loss(*args, **kwargs)
        loss = self._stock["compute_loss"](*args, **kwargs)
        size = self._collectives.size
        if self._is_in_keras_loss or size == 1:
            return loss
        return loss + tf.stop_gradient(loss) * (size - 1)

    def _unscaled_loss(self, *args, **kwargs):
        """For Keras 3.5, which scales no loss by the number of replicas.

        What layers add (regularizers) is then summed over the ranks with the
        gradients; its value stays as it is.
        """
        loss = self._stock["compute_loss"](*args, **kwargs)
        size = self._collectives.size
        added = [tf.reduce_sum(x) for x in self._model.losses if size > 1]
        if not added:
            return loss
        added = tf.add_n(added)
        return loss - (added - tf.stop_gradient(added)) * (1 - 1 / size)

    def train_step(self, batch):
        self._check_optimizer()
        logs = self._logs_of("train_step", batch)
        if self._collectives.size > 1:
            empty_parts.combine_statistics(
                self._model, batch, self._collectives
            )
        return logs

    def test_step(self, batch):
        return self._logs_of("test_step", batch)

    def _step(self, name, batch):
        self._is_in_step = True
        try:
            return self._stock[name](batch)
        finally:
            self._is_in_step = False

    def _logs_of(self, name, batch):
        logs = self._step(name, batch)
        results = self._global_results()
        if not isinstance(logs, dict):
            return logs
        # What is no metric's result, a step of the user's own computes.
        others = [key for key in logs if key not in results]
        means = self._collectives.all_reduce(
            [tf.cast(logs[key], tf.float32) for key in others],
            op="mean",
            name="model/logs",
        )
        logs = {**logs, **dict(zip(others, means, strict=True))}
        return {key: results.get(key, value) for key, value in logs.items()}

    def get_metrics_result(self):
        # `_logs_of` aggregates once for the whole step.
        if self._is_in_step or compat.in_symbolic_scope():
            return self._stock["get_metrics_result"]()
        return self._global_results()

    def _global_results(self):
        built = [m for m in self._model.metrics if getattr(m, "built", True)]
        if len(built) < len(self._model.metrics):
            # A step of the user's own never updated what `compile` was given.
            return metrics.global_results(built, self._collectives)
        return metrics.global_results(
            self._model.metrics,
            self._collectives,
            self._stock["get_metrics_result"],
        )

    def predict_step(self, batch):
        outputs = self._step("predict_step", batch)
        if self._collectives.size == 1:
            return outputs
        return tf.nest.map_structure(
            lambda part: _whole_batch(part, self._collectives), outputs
        )

    # What comes before the first step.

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        """Builds the model from the shapes of a batch, without reading one.

        Keras reads a batch and throws it away. A generator's cannot be read
        again, and what was prefetched meanwhile differs between the ranks.
        """
        if iterator is not None:
            data_batch = compat.batch_shapes(iterator)
            if self._awaits_input:
                self._awaits_input.use_input(iterator)
                self._awaits_input = None
        self._stock["_maybe_symbolic_build"](data_batch=data_batch)

    def make_train_function(self, *args, **kwargs):
        self._synchronise()
        return self._stock["make_train_function"](*args, **kwargs)

    def make_test_function(self, *args, **kwargs):
        self._synchronise()
        return self._stock["make_test_function"](*args, **kwargs)

    def make_predict_function(self, *args, **kwargs):
        self._synchronise()
        return self._stock["make_predict_function"](*args, **kwargs)

    def _synchronise(self):
        """Gives every rank rank 0's dense variables, once for each variable.

        Random layers then draw differently on each rank.
        """
        communicator = self._collectives
        variables = [
            v
            for v in self._model.variables
            if not (isinstance(v, TableVariable) and v.table.is_sharded)
        ]
        identity = tuple(id(v) for v in variables)
        if communicator.size == 1 or identity == self._synchronised:
            return
        communicator.check_equal(
            agreement.of_model(self._model),
            "The model and its optimizer",
            "Build the same model on every rank.",
        )
        folded = [v for v in variables if random_states.is_own(v)]
        synchronised = [v for v in variables if id(v) not in self._folded]
        values = communicator.broadcast(
            [tf.convert_to_tensor(v.value) for v in synchronised],
            name="model/variables",
        )
        for variable, value in zip(synchronised, values, strict=True):
            variable.assign(value)
        for variable in folded:
            if id(variable) not in self._folded:
                self._folded.add(id(variable))
                random_states.fold_rank(variable, communicator.rank)
        self._synchronised = identity

    # Saving.

    def save(self, *args, **kwargs):
        self._save("save", args, kwargs)

    def save_weights(self, *args, **kwargs):
        self._save("save_weights", args, kwargs)

    def get_compile_config(self):
        """As stock, but with loss scaling outermost, where Keras looks for it.

        Else a model that is loaded outside of a scope would get a second one.
        """
        config = self._stock["get_compile_config"]()
        hybrid = (config or {}).get("optimizer") or {}
        inner = hybrid.get("config", {}).get("inner_optimizer")
        if inner and inner["class_name"] == "LossScaleOptimizer":
            rule = inner["config"]["inner_optimizer"]
            hybrid = {
                **hybrid,
                "config": {**hybrid["config"], "inner_optimizer": rule},
            }
            config["optimizer"] = {
                **inner,
                "config": {**inner["config"], "inner_optimizer": hybrid},
            }
        return config

    def _save(self, name, args, kwargs):
        self._check_same_call(name, {})
        with saving.on_rank_zero(self._model) as is_writer:
            if is_writer:
                self._stock[name](*args, **kwargs)


def _bound_arguments(function, args, kwargs):
    """Arguments of a call by name, those given only."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    arguments = dict(bound.arguments)
    arguments.update(arguments.pop("kwargs", {}))
    return arguments


def _whole_batch(part, communicator):
    """All ranks' parts of a batch of predictions, in order."""
    if isinstance(part, tf.RaggedTensor):
        return tf.RaggedTensor.from_row_lengths(
            _whole_batch(part.values, communicator),
            _whole_batch(part.row_lengths(), communicator),
        )
    part = tf.convert_to_tensor(part)
    if part.shape.rank == 0:
        part = part[tf.newaxis]
    return communicator.all_gather(part, name="model/predict")
