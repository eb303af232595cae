"""Metric functions that return one number for a batch, as a root of a mean.

Such numbers of parts do not give that of the batch. Each rank gathers the
targets and outputs of all, and counts the number of the whole batch.
"""

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_losses
from keras_sparsity.global_batch import loss_scale
from keras_sparsity.global_batch.gathering import gather_batch, of_gathered

# Set on a metric: whether its function returns one number.
_IS_OF_BATCH = "_keras_sparsity_is_of_batch"


def is_of_batch(metric, y_true, y_pred):
    """Whether a metric is a function that returns one number for a batch.

    Args:
        metric: `keras.Metric`.
        y_true, y_pred: targets and outputs of a part of a batch.
    """
    is_function = isinstance(metric, keras.metrics.MeanMetricWrapper)
    if not is_function or not all(map(_can_be_gathered, (y_true, y_pred))):
        return False
    if not hasattr(metric, _IS_OF_BATCH):
        found = _returns_a_number(metric, y_true, y_pred)
        object.__setattr__(metric, _IS_OF_BATCH, found)
    return getattr(metric, _IS_OF_BATCH)


def _can_be_gathered(x):
    if not isinstance(x, tf.Tensor):
        return False
    is_number = x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_bool
    return is_number and x.shape.rank != 0


def _returns_a_number(metric, y_true, y_pred):
    """Traces the function, which then does not run once more.

    One of an eager step may need values: it runs on the whole batch, as a
    part may have too few examples.
    """
    function, made = keras_losses.metric_function(metric), _traced
    if tf.executing_eagerly():
        y_true, y_pred = map(gather_batch, (y_true, y_pred))
        made = _called
    with loss_scale.of_own_part(), of_gathered():
        return made(function, y_true, y_pred).shape.rank == 0


def _called(function, *batch):
    return tf.convert_to_tensor(function(*batch))


def _traced(function, *batch):
    traced = tf.function(lambda: _called(function, *batch), autograph=False)
    return traced.get_concrete_function().structured_outputs


def update(stock, y_true, y_pred, sample_weight=None):
    """Updates a metric by the whole batch, on every rank.

    The mean over the ranks, which count alike, is that of the batches.

    Args:
        stock: the metric's `update_state`.
        y_true, y_pred: of this rank's part.
        sample_weight: None, or one number: Keras takes no others here.
    """
    y_true, whole = gather_batch(y_true), gather_batch(y_pred)
    _carry(y_pred, whole)
    with loss_scale.of_own_part(), of_gathered():
        stock(y_true, whole, sample_weight=sample_weight)


def _carry(part, whole):
    mask = keras_losses.keras_mask(part)
    if mask is not None:
        keras_losses.set_keras_mask(whole, gather_batch(mask))
    logits = keras_losses.keras_logits(part)
    if logits is not None:
        keras_losses.set_keras_logits(whole, gather_batch(logits))
