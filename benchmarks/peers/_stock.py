"""The workloads built of stock layers, for the peers."""

import argparse
import sys

import keras
import tensorflow as tf
from workloads import _common


class SampledSoftmax(keras.layers.Layer):
    """TensorFlow's sampled softmax as a model's last layer.

    It returns the hidden states in training and the logits of all classes
    otherwise; the loss distinguishes the two by their width.

    Args:
        num_classes: In all.
        num_sampled: In a sample.
    """

    def __init__(self, num_classes, num_sampled):
        super().__init__()
        self.num_classes, self.num_sampled = num_classes, num_sampled

    def build(self, input_shape):
        if input_shape[-1] == self.num_classes:
            raise ValueError(
                "The width of the hidden states must not be the number of "
                f"classes. Received: {self.num_classes} for both."
            )
        self.kernel = self.add_weight(
            (self.num_classes, input_shape[-1]), "glorot_uniform", name="kernel"
        )
        self.bias = self.add_weight((self.num_classes,), "zeros", name="bias")

    def call(self, hidden, training=None):
        if training:
            return hidden
        logits = tf.einsum("...d,vd->...v", hidden, self.kernel.value)
        return logits + self.bias.value

    def weights_and_biases(self):
        return self.kernel.value, self.bias.value

    def loss(self):
        """Function from labels and the layer's outputs to a loss per label."""
        return self._losses_of

    def _losses_of(self, labels, outputs):
        labels = tf.cast(labels, tf.int64)
        if outputs.shape[-1] == self.num_classes:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, outputs
            )
        losses = tf.nn.sampled_softmax_loss(
            *self.weights_and_biases(),
            tf.reshape(labels, [-1, 1]),
            tf.reshape(outputs, [-1, outputs.shape[-1]]),
            self.num_sampled,
            self.num_classes,
        )
        return tf.reshape(losses, tf.shape(labels))


class Bag(keras.layers.Layer):
    """The sum of the rows of several ids.

    Args:
        embedding: The layer of the rows.
    """

    def __init__(self, embedding):
        super().__init__(name=f"{embedding.name}_bag")
        self.embedding = embedding

    def call(self, ids):
        return keras.ops.sum(self.embedding(ids), axis=-2)

    @classmethod
    def of(cls, embedding):
        """The `bag` of a `Kit` whose embeddings are these."""
        return lambda *args, **kwargs: cls(embedding(*args, **kwargs))


KIT = _common.Kit(
    keras.layers.Embedding, Bag.of(keras.layers.Embedding), SampledSoftmax
)


def parse(description, add_options=lambda add: None):
    """The workload's module, by the first argument, and all arguments.

    Args:
        description: Of the peer.
        add_options: Function of `ArgumentParser.add_argument`, for its own.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workload", choices=_common.NAMES)
    add_options(parser.add_argument)
    name = sys.argv[1] if len(sys.argv) > 1 else None
    if name not in _common.NAMES:
        parser.parse_args()
        parser.error("The workload must be the first argument.")
    module = _common.module(name)
    return module, _common.parse(module, parser)
