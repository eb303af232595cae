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
