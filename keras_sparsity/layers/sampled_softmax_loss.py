"""The loss of a model that ends in a `SampledSoftmax`."""

import keras
import tensorflow as tf

from keras_sparsity._tf import checks, keras_scopes

# On the layer's outputs, for its loss: the layer, whether it is in training,
# and a list of the rows that its loss needs if they were gathered before.
ORIGIN = "_keras_sparsity_sampled_softmax"


@keras.saving.register_keras_serializable(package="keras_sparsity")
class SampledSoftmaxLoss(keras.losses.Loss):
    """The loss of a model that ends in a `SampledSoftmax` layer.

    Sampled in training, over all classes otherwise. It finds the layer by
    the tensor that it returned, so a saved model needs to know no more than its
    class. Made by `SampledSoftmax.loss()`.

    Args:
        reduction, name, dtype: as for every `keras.losses.Loss`.
    """

    def __init__(
        self,
        reduction="sum_over_batch_size",
        name="sampled_softmax_loss",
        dtype=None,
    ):
        checks.optional_string("reduction", reduction)
        super().__init__(
            name=name,
            reduction=reduction and checks.shortened(reduction),
            dtype=dtype,
        )

    def call(self, y_true, y_pred):
        origin = getattr(y_pred, ORIGIN, None)
        if origin is None and keras_scopes.is_tracing_shapes():
            return tf.zeros(tf.shape(y_pred)[:-1], y_pred.dtype)
        if origin is None:
            raise ValueError(
                "The loss of `SampledSoftmax` was called on something else "
                f"than what such a layer has just returned. Received: {y_pred}"
                ". Make it the model's last layer, with the loss's dtype "
                f"({self.dtype}), and call model and loss in the same "
                "function. The loss of plain logits, such as "
                "`model.predict` returns, is "
                "`keras.losses.SparseCategoricalCrossentropy("
                "from_logits=True)`."
            )
        layer, is_training, ahead = origin
        labels = _labels(y_true, y_pred, layer)
        labels = tf.reshape(labels, [-1])
        flat = tf.reshape(y_pred, [-1, y_pred.shape[-1]])
        if is_training:
            flat = layer.sampled_losses(labels, flat, ahead)
        else:
            flat = layer.full_losses(labels, flat)
        flat = tf.reshape(flat, tf.shape(y_pred)[:-1])
        return tf.ensure_shape(flat, y_pred.shape[:-1])

    def get_config(self):
        return {**super().get_config(), "dtype": self.dtype}


def pass_on(part, whole):
    """Lets the loss take outputs of which what a layer returned is a part."""
    if hasattr(part, ORIGIN):
        setattr(whole, ORIGIN, getattr(part, ORIGIN))


def _labels(y_true, y_pred, layer):
    labels = tf.cast(y_true, tf.int64)
    if labels.shape.rank == y_pred.shape.rank and labels.shape[-1] == 1:
        labels = tf.squeeze(labels, -1)
    if not labels.shape.is_compatible_with(y_pred.shape[:-1]):
        raise ValueError(
            f"The loss of '{layer.name}' takes class ids, one for each of the "
            f"layer's inputs. Received: labels of shape {y_true.shape}. "
            f"Expected: {y_pred.shape[:-1]}."
        )
    return labels


def losses_of_sample(labels, classes, hidden, rows, offsets):
    """Losses `(n,)` over a sample.

    Args:
        labels: int64 `(n,)`.
        classes: int64 `(num_sampled,)`, the sample.
        hidden: `(n, dim)`.
        rows: `(n + num_sampled, dim)`, weights of the labels and the sample.
        offsets: `(n + num_sampled,)`, what is added to their logits.
    """
    sizes = [tf.size(labels), tf.size(classes)]
    label_rows, sampled_rows = tf.split(rows, sizes)
    label_offsets, sampled_offsets = tf.split(offsets, sizes)

    label_logits = tf.reduce_sum(hidden * label_rows, -1) + label_offsets
    logits = tf.matmul(hidden, sampled_rows, transpose_b=True)
    logits += sampled_offsets
    # An example's own class may be in the sample: it counts once.
    is_hit = tf.equal(
        tf.cast(labels, tf.int32)[:, tf.newaxis],
        tf.cast(classes, tf.int32),
    )
    logits = tf.where(is_hit, logits.dtype.min, logits)
    # The crossentropy's own operation takes twice as long on a CPU, and
    # needs a copy of all logits with the labels' among them.
    largest = tf.maximum(tf.reduce_max(logits, axis=-1), label_logits)
    largest = tf.stop_gradient(largest)
    total = tf.reduce_sum(tf.exp(logits - largest[:, tf.newaxis]), axis=-1)
    total += tf.exp(label_logits - largest)
    return tf.math.log(total) + largest - label_logits
