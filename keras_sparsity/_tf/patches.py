"""Global names of Keras and TensorFlow that are replaced for a while.

All of them, each with its extent and its reason; `Patch.by` alone replaces
them. Methods of one model are bound on that model, see `training.binding`.

Checked on TensorFlow 2.16 to 2.21 and Keras 3.5 to 3.15.
"""

import contextlib
import inspect
import sys

import tensorflow as tf

from keras_sparsity._tf.current_variable import keeper_of
from keras_sparsity._tf.keras_input import EpochInput
from keras_sparsity._tf.keras_losses import losses_are_scaled
from keras_sparsity._tf.keras_scopes import is_given, is_tracing_shapes
from keras_sparsity._tf.keras_variables import is_variable
from keras_sparsity._tf.patch import Patch

COMPILE = Patch(
    "keras:Model",
    "compile",
    during="`strategy.scope()`",
    reason="A model that is compiled there is adopted, of whatever class.",
)
LOSS_CALL = Patch(
    "keras:losses.Loss",
    "__call__",
    during="`strategy.scope()` and `strategy.run`; steps of stages whose loss "
    "is a sum, traced",
    reason="A custom loop makes and calls Keras's losses by itself, and steps "
    "hand out the sum of all losses alone.",
)
ADD_WEIGHT = Patch(
    "keras:Layer",
    "add_weight",
    during="`strategy.scope()` of strategies that cut models into stages",
    reason="Weights of other stages are to get no values in between.",
)
MODEL_CALL = Patch(
    "keras:Model",
    "__call__",
    during="`strategy.run`, which is the tracing of a step",
    reason="A step of the user's own calls models by themselves.",
    spares_bases=True,  # calls of layers are many
)
TAPE_ENTER, TAPE_EXIT, TAPE_RESET = (
    Patch(
        "tensorflow:GradientTape",
        name,
        during="the tracing of a step of the user's own",
        reason=reason,
    )
    for name, reason in (
        ("__enter__", "What a step asks for under its tape is recorded by it."),
        ("__exit__", "Behind its first tape a step may have another one."),
        ("reset", "A tape that is reset forgets what it has recorded."),
    )
)
METRIC_INIT = Patch(
    "keras:Metric",
    "__init__",
    during="`strategy.scope()`",
    reason="A custom loop makes metrics and reads their results by itself.",
)
METRIC_ATTRIBUTES = Patch(
    "keras:Metric",
    "__getattribute__",
    during="the tracing of a step on several processes",
    reason="A step may use metrics that its model does not list.",
)
ASSIGN = Patch(
    "keras.src.backend:Variable",
    "assign",
    during="the tracing of a step on several processes; `fit` with variables "
    "at servers",
    reason="A metric's combined value holds until the metric is updated; what "
    "a step or a callback assigns to variables at servers would be lost.",
)
SCALE_LOSS = Patch(
    "keras.src.losses.loss",
    "scale_loss_for_distribution",
    during="the tracing of a layer, metric or inner loss",
    reason="Keras divides their losses by the number of replicas.",
)
SQRT = Patch(
    "keras.src.backend.tensorflow.numpy",
    "sqrt",
    during="the tracing of an optimizer's rule",
    reason="All rules of Keras call it, through `keras.ops.sqrt`.",
)
TAKE = Patch(
    "keras.src.backend.tensorflow.numpy",
    "take",
    during="`strategy.run`, which is the tracing of a step",
    reason="`keras.layers.Embedding` reads rows by it, of the whole variable.",
)
SEED_NEXT = Patch(
    "keras:random.SeedGenerator",
    "next",
    during="`strategy.run`, which is the tracing of a step",
    reason="Layers of a custom loop draw by states that all ranks have alike.",
)
VECTORIZED_MAP = Patch(
    "tensorflow",
    "vectorized_map",
    during="`strategy.run`, which is the tracing of a step",
    reason="Messages of tables have no vectorized form; `keras.ops` calls it.",
)
EMBEDDING_WEIGHT = Patch(
    "keras:layers.Embedding",
    "add_weight",
    during="`strategy.scope()`",
    reason="A table whose rows are spread is never whole in a process.",
)
ARRAY_DATASET = Patch(
    "keras.src.trainers.data_adapters.array_data_adapter:ArrayDataAdapter",
    "get_tf_dataset",
    during="`fit`",
    reason="`fit` makes the adapter and its dataset in one function.",
)
SHUFFLE = Patch(
    "tensorflow:random",
    "shuffle",
    during="the tracing of that dataset",
    reason="Keras calls it in a function inside of `get_tf_dataset`.",
)
EPOCH_ITERATOR = Patch(
    "keras.src.backend.tensorflow.trainer:TFEpochIterator",
    "__init__",
    during="`fit`, `evaluate` and `predict`",
    reason="`fit` makes the iterator and its dataset in one function.",
)
SAVES = {  # each with the name of the model's own method
    Patch(
        owner,
        name,
        during="the process, once several train a model",
        reason="`keras.saving.save_model` and `save_weights` call no method of "
        "the model's.",
    ): method
    for owner, name, method in (
        ("keras.src.saving.saving_lib", "save_model", "save"),
        ("keras.src.saving.saving_lib", "save_weights_only", "save_weights"),
        (
            "keras.src.legacy.saving.legacy_h5_format",
            "save_model_to_hdf5",
            "save",
        ),
    )
}
_OF_BATCHES = "train_on_batch", "test_on_batch", "predict_on_batch"
RUNS = "fit", "evaluate", "predict", *_OF_BATCHES  # of a model
MODEL_METHODS = {
    name: Patch(
        "keras:Model",
        name,
        during="a method of this name of the user's class, for its model alone",
        reason="That method calls `super()`'s.",
    )
    for name in (*RUNS, "compute_loss")
}
UNADOPTED_RUNS = {
    name: Patch(
        "keras:Model",
        name,
        during="the process, once a strategy's scope was entered",
        reason="A model that is made there and not compiled there keeps its "
        "class's methods, and Keras gives it the strategy.",
    )
    for name in RUNS
}
ALL = (
    *(named for named in vars().values() if isinstance(named, Patch)),
    *SAVES,
    *MODEL_METHODS.values(),
    *UNADOPTED_RUNS.values(),
)


def models_compile_by(compile_):
    """`compile_(stock, model, args, kwargs)` in place of `Model.compile`."""

    def make(stock):
        def compile(model, *args, **kwargs):
            compile_(stock, model, args, kwargs)

        return compile

    return COMPILE.by(make)


def assignments_are_told(tell):
    """While entered, `tell(variable)` follows each `variable.assign(...)`.

    `assign_add` and the other ways to assign call `assign`.
    """

    def make(stock):
        def assign(variable, value):
            value = stock(variable, value)
            if not is_tracing_shapes():  # where nothing is assigned
                tell(variable)
            return value

        return assign

    return ASSIGN.by(make)


def next_seeds_are_changed(change):
    """While entered, `change(generator, seed)` gives what `next` returns."""

    def make(stock):
        def next(generator, *args, **kwargs):
            return change(generator, stock(generator, *args, **kwargs))

        return next

    return SEED_NEXT.by(make)


@contextlib.contextmanager
def first_tape_is_told(on_begin, on_end):
    """While entered, `tf.GradientTape` tells where the first one records alone.

    `GradientTape._watch_accessed_variables`: a tape that waits for `watch`
    might not record what is read where it begins.

    Args:
        on_begin: function called when the first tape begins to record.
        on_end: function called when it ends, is reset or is about to be joined
            by another tape; and in place of `on_begin`, if it waits for
            `watch`. Not if an exception ends it.
    """
    first, is_over = None, False

    def end():
        nonlocal is_over
        if not is_over:
            is_over = True
            on_end()

    def make_enter(stock):
        def enter(tape):
            nonlocal first
            if first is not None or not tape._watch_accessed_variables:
                end()
                return stock(tape)
            first = tape
            stock(tape)
            try:
                on_begin()
            except BaseException:
                tape.__exit__(*sys.exc_info())
                raise
            return tape

        return enter

    def make_exit(stock):
        def leave(tape, kind, value, traceback):
            stock(tape, kind, value, traceback)
            if tape is first and kind is None:
                end()

        return leave

    def make_reset(stock):
        def reset(tape):
            if tape is first:
                end()
            stock(tape)

        return reset

    with (
        TAPE_ENTER.by(make_enter),
        TAPE_EXIT.by(make_exit),
        TAPE_RESET.by(make_reset),
    ):
        yield


def losses_are_not_scaled():
    """While entered, Keras divides no loss by the number of replicas."""
    if not losses_are_scaled():  # Keras 3.5 to 3.7
        return contextlib.nullcontext()
    return SCALE_LOSS.by(lambda stock: lambda value: value)


def method_for(name, model, method):
    """While entered, a model's Keras method is `method`, without the model."""

    def make(stock):
        def dispatch(self, *args, **kwargs):
            if self is model:
                return method(*args, **kwargs)
            return stock(self, *args, **kwargs)

        return dispatch

    return MODEL_METHODS[name].by(make)


def roots_stay_roots():
    """While entered, TensorFlow does not rewrite traced roots to `rsqrt`.

    TensorFlow makes `x * rsqrt(y)` of `x / sqrt(y)` in a function. Its `rsqrt`
    rounds the last elements of a tensor, which do not fill a vector register,
    differently. An update (of Adagrad, RMSprop, Adadelta) would depend on a
    row's place in its partition, and so on the number of partitions. `sqrt`
    and division round all elements alike. `ensure_shape` stops the rewriting.
    """

    def make(stock):
        def sqrt(x):
            root = stock(x)
            return tf.ensure_shape(root, root.shape)

        return sqrt

    return SQRT.by(make)


def current_rows_are_taken():
    """While entered, `keras.ops.take` reads the rows that it returns alone.

    Of variables with a `keeper`, which brings rows up to date that are read,
    and of those that are `is_looked_up`.
    """

    def make(stock):
        def take(x, indices, axis=None):
            # `Variable.value` may be a cast of all rows.
            value = x._value if is_variable(x) else None
            is_of_rows = keeper_of(value) is not None or getattr(
                value, "is_looked_up", False
            )
            is_dense = isinstance(indices, tf.Tensor)
            if not is_of_rows or axis != 0 or not is_dense or is_given(x):
                return stock(x, indices, axis=axis)
            is_from_end = indices < 0
            from_end = indices + tf.cast(value.shape[0], indices.dtype)
            ids = tf.where(is_from_end, from_end, indices)
            return tf.cast(tf.gather(value, ids), x.dtype)

        return take

    return TAKE.by(make)


def epoch_iterators_are_made_in(scope, check=None):
    """While entered, `fit` and the like make their input inside of a scope.

    A run within a run, as of a callback's, makes it in the inner run's alone.

    Args:
        scope: function of an `EpochInput` that gives a context manager.
        check: function of an epoch iterator that is made, or None.
    """

    def make(stock):
        stock = inspect.unwrap(stock)

        def initialize(self, *args, **kwargs):
            # `fit` alone has class weights, of the batches that it trains on.
            trains = "class_weight" in kwargs
            with scope(EpochInput(self, trains)):
                stock(self, *args, **kwargs)
            if check is not None:
                check(self)

        return initialize

    return EPOCH_ITERATOR.by(make)
