"""Keras's losses and compiled metrics. Checked on Keras 3.5 to 3.15."""

import contextlib
import functools

import keras
import tensorflow as tf

from keras_sparsity._tf import contexts

# Keras's own steps call this for `compute_loss`: Keras 3.6 and later.
STEP_LOSS = "_compute_loss"

# Aggregates the losses that layers add; None before Keras 3.8.
ADDED_LOSS = (
    "_aggregate_additional_loss"
    if hasattr(keras.Model, "_aggregate_additional_loss")
    else None
)


def resolve_loss(identifier, y_true=None, y_pred=None):
    """The `keras.losses.Loss` that `compile(loss=identifier)` would use.

    `keras.src.trainers.compile_utils.get_loss`.
    """
    from keras.src.trainers import compile_utils

    return compile_utils.get_loss(identifier, y_true, y_pred)


def function_arguments(loss):
    """The arguments of the function that a Keras loss calls.

    `LossFunctionWrapper._fn_kwargs`: `get_config` leaves some out.
    """
    return dict(getattr(loss, "_fn_kwargs", {}))


def match_ranks(values, weights):
    """Both with the same number of dimensions, as Keras's losses do it.

    `squeeze_or_expand_to_same_rank`.
    """
    from keras.src.losses import loss

    return loss.squeeze_or_expand_to_same_rank(values, weights)


def keras_mask(tensor):
    """The mask that a tensor carries (`_keras_mask`), or None."""
    return getattr(tensor, "_keras_mask", None)


def set_keras_mask(tensor, mask):
    """Lets a tensor carry a mask, as Keras's layers do."""
    tensor._keras_mask = mask


def keras_logits(tensor):
    """The logits under a sigmoid's or softmax's output, or None.

    `_keras_logits`: Keras's losses use them in place of the output.
    """
    return getattr(tensor, "_keras_logits", None)


def set_keras_logits(tensor, logits):
    """Lets a tensor carry logits, as Keras's activations do."""
    tensor._keras_logits = logits


def losses_are_scaled():
    """Whether this Keras divides a loss by the number of replicas.

    Keras 3.5 to 3.7 do not. Later ones divide it when computed and multiply
    it again before it is shown (`unscale_loss_for_distribution`).
    """
    from keras.src.losses import loss

    return hasattr(loss, "unscale_loss_for_distribution")


def loss_metrics_multiplied(model, factor):
    """While entered, the losses of outputs are multiplied before shown.

    For Keras 3.5 to 3.7; later ones do it themselves (`losses_are_scaled`).
    """
    metrics = [] if losses_are_scaled() else loss_metrics(model)
    return _updated_by(metrics, lambda value, weight: (value * factor, weight))


def loss_metrics_of_share(model, share):
    """While entered, the losses of outputs are those of a share of a batch.

    For losses that are not divided by the number of replicas, by which Keras
    multiplies them before it shows them (`losses_are_scaled`). The share is
    None of a whole batch, which Keras weights.
    """
    num_replicas = tf.distribute.get_strategy().num_replicas_in_sync
    factor = 1 / num_replicas if losses_are_scaled() else 1

    def weighted(value, weight):
        return value * factor, weight if share is None else share

    return _updated_by(loss_metrics(model), weighted)


@contextlib.contextmanager
def _updated_by(metrics, change):
    """While entered, metrics have values and weights changed in updates."""

    def changing(update_state):
        def update(value, sample_weight=None):
            value, weight = change(value, sample_weight)
            return update_state(value, sample_weight=weight)

        return update

    with contextlib.ExitStack() as stack:
        for metric in metrics:
            update = changing(metric.update_state)
            stack.enter_context(
                contexts.own_attributes(metric, update_state=update)
            )
        yield


def losses_replaced(model, losses):
    """While entered, `model.losses` are others (`_losses_override`)."""
    return contexts.own_attributes(model, _losses_override=losses)


def clear_losses(layer):
    """Forgets the losses that a layer's earlier calls have added.

    Keras does so in `Layer.__call__` (`_clear_losses`).
    """
    layer._clear_losses()


def step_loss(model, **arguments):
    """The loss of a step as Keras's own steps compute it."""
    if losses_are_scaled():
        return getattr(model, STEP_LOSS)(**arguments)
    arguments.pop("training")  # Keras 3.5
    return model.compute_loss(**arguments)


def means_examples_plainly(model):
    """Whether a class of Keras's computes a model's loss by plain means.

    `keras.distillation.Distiller`, of Keras 3.12 and later.
    """
    distillation = getattr(keras, "distillation", None)
    if distillation is None:
        return False
    return type(model).compute_loss is distillation.Distiller.compute_loss


def loss_tracker(model):
    """The metric that shows a compiled model's loss (`_loss_tracker`)."""
    return model._loss_tracker


def compiled_metrics(model):
    """The object that updates `compile`'s metrics, or None.

    `Model._compile_metrics`.
    """
    return getattr(model, "_compile_metrics", None)


def is_compiled_metrics(metric):
    """Whether it is such an object (`CompileMetrics`)."""
    from keras.src.trainers import compile_utils

    return isinstance(metric, compile_utils.CompileMetrics)


def metric_function(metric):
    """A `MeanMetricWrapper`'s function of targets and outputs.

    `_fn` and `_fn_kwargs`.
    """
    return functools.partial(metric._fn, **metric._fn_kwargs)


def loss_metrics(model):
    """The metrics that show the losses of a compiled model's outputs.

    `Model._compile_loss`.
    """
    loss = getattr(model, "_compile_loss", None)
    return [] if loss is None else list(loss.metrics)
