"""Keras's models and layers. Checked on Keras 3.5 to 3.15."""

import contextlib

import keras
import tensorflow as tf

from keras_sparsity._tf import contexts

# `fit`, `evaluate` and `predict` call this before their first step.
SYMBOLIC_BUILD = "_maybe_symbolic_build"

# `fit` and `evaluate` call this with the logs of their last step.
RESULTS_OR_LOGS = "_get_metrics_result_or_logs"

# `fit` passes this argument to `evaluate`.
IN_FIT = "_use_cached_eval_dataset"

# Attributes that `Model.compile` and the first calls set, with their values
# before (`Trainer.__init__`).
COMPILE_STATE = {
    "compiled": False,
    "loss": None,
    "optimizer": None,
    "_compile_config": None,
    "_compile_loss": None,
    "_compile_metrics": None,
    "_distribute_strategy": None,
    "_loss_tracker": None,
    "train_function": None,
    "test_function": None,
    "predict_function": None,
}

# Attributes that tie a layer to a graph of operations and to the layers around
# it.
LAYER_PLACE = (
    "_called",
    "_inbound_nodes",
    "_outbound_nodes",
    "_parent_path",
    "_saved_model_arg_spec",
    "_saved_model_inputs_spec",
)


def set_distribute_strategy(model, strategy):
    """Makes a model that was built anywhere train under `strategy`.

    `Model._distribute_strategy`, which Keras sets in the constructor only.
    """
    model._distribute_strategy = strategy


def compile_arguments(model):
    """The arguments that a model was compiled with, by name; {} if it was not.

    `Model._compile_config`, a `SerializableDict` of the objects themselves.
    """
    config = getattr(model, "_compile_config", None)
    return dict(config.config) if model.compiled and config else {}


def empty_logs_are_metrics(model):
    """While entered, epochs without a step of their own log the metrics.

    Such as one that is resumed behind its last step. `RESULTS_OR_LOGS`, which
    another function may stand for already.
    """
    stock = getattr(model, RESULTS_OR_LOGS)

    def results_or_logs(logs):
        found = stock(logs)
        return found if logs else model.get_metrics_result()

    return contexts.own_attributes(model, **{RESULTS_OR_LOGS: results_or_logs})


def losses_and_metrics_may_fail(model):
    """While entered, a symbolic build ends though their code needs values.

    They are built before their code runs. `Trainer._compute_loss`.
    """

    def without_errors(function):
        def run(*args, **kwargs):
            with contextlib.suppress(Exception):
                return function(*args, **kwargs)
            return {}

        return run

    return contexts.own_attributes(
        model,
        compute_metrics=without_errors(model.compute_metrics),
        _compute_loss=without_errors(model._compute_loss),
    )


@contextlib.contextmanager
def losses_and_metrics_wait(model):
    """While entered, a symbolic build builds no losses and no metrics.

    `CompileMetrics.built` and `CompileLoss.built`.
    """
    waiting = [each for each in _compiled(model) if not each.built]
    for each in waiting:
        each.built = True
    try:
        yield
    finally:
        for each in waiting:
            each.built = False


def holders_of_metrics(model):
    """List of `(object, its metrics)`, whatever has been built so far.

    A metric holds itself. The last one is the compiled loss, or None: it makes
    the metrics of outputs' losses when it is built (`CompileLoss.metrics`).
    """
    loss = model._compile_loss
    of_loss = list(getattr(loss, "metrics", ()))
    others = [
        metric
        for metric in model.metrics
        if not any(metric is each for each in of_loss)
    ]
    return [*((metric, [metric]) for metric in others), (loss, of_loss)]


def drop_functions(model):
    """Has a model trace its functions anew, by Keras's own methods.

    Those that a strategy has bound involve all ranks.
    """
    for kind in ("train", "test", "predict"):
        if getattr(model, f"{kind}_function", None) is not None:
            make = getattr(type(model), f"make_{kind}_function")
            make(model, force=True)


def is_built(model):
    """Whether a symbolic build calls nothing of the model."""
    return has_all_weights(model) and all(
        each.built for each in _compiled(model)
    )


def overrides(model, *names):
    """Whether a model's class has any of these methods of its own."""
    kind = type(model)
    return any(
        getattr(kind, name) is not getattr(keras.Model, name) for name in names
    )


def has_all_weights(model):
    """Whether all layers of a model are built."""
    return all(part.built for part in (model, *all_layers(model)))


def _compiled(model):
    """`Model._compile_metrics`, `_compile_loss`."""
    both = model._compile_metrics, model._compile_loss
    return [each for each in both if each is not None]


def can_be_called_on_shapes(model, inputs):
    """Whether a symbolic build can call the model.

    Args:
        inputs: tensors, or their specs. `backend.compute_output_spec`.
    """
    from keras.src import backend

    def symbolic(leaf):
        if leaf is None:
            return None
        dtype = backend.standardize_dtype(leaf.dtype)
        return keras.KerasTensor(leaf.shape, dtype)

    try:
        symbols = keras.tree.map_structure(symbolic, inputs)
        backend.compute_output_spec(model, symbols, training=False)
    except Exception:
        return False
    return True


def all_layers(model):
    """All layers of a model, at any depth (`_flatten_layers`)."""
    return list(model._flatten_layers(include_self=False))


def sublayers(layer):
    """The layers that a layer holds itself (`_flatten_layers`)."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def weights_that_were_trainable(model):
    """Weights that layers have made to be trained, frozen since or not.

    `_flatten_layers`, `_trainable_variables`.
    """
    found = {}
    for layer in model._flatten_layers():
        found.update((id(v), v) for v in layer._trainable_variables)
    return list(found.values())


def built_with(layer):
    """The arguments of a layer's `build`, by name (`_build_shapes_dict`)."""
    return dict(layer._build_shapes_dict or {})


def calls_with_more_arguments(layer, name):
    """Whether a layer is called with a second input of a name, in any graph.

    `Operation._inbound_nodes`, `Node.arguments`.
    """
    return any(
        len(node.arguments.args) > 1
        # Keras 3.5 gives a mask of None for each input.
        or any(
            value is not None
            for value in tf.nest.flatten(node.arguments.kwargs.get(name))
        )
        for node in layer._inbound_nodes
    )
