"""A `SampledSoftmax` as costs see it: the rows of a batch, and its loss.

Its layer returns hidden states in training, and its loss does the rest. The
class stands above this folder: a layer is known by what it has.
"""

import tensorflow as tf


def is_softmax(layer):
    """Whether a layer or operation is a `SampledSoftmax`."""
    return hasattr(layer, "sampled_losses")


def computed_with_losses(part, calls):
    """A function that computes a part in training, with its softmaxes' losses.

    These are of zeros in place of labels and rows, so that no process waits
    for others. It takes and returns a list of tensors.

    Args:
        calls: the calls of the whole model.
    """
    layers = {
        id(tensor): call.operation
        for call in calls
        if is_softmax(call.operation)
        for tensor in call.outputs
    }
    of_made = [layers.get(id(tensor)) for tensor in part.made]

    def compute(tensors):
        made = part.compute(tensors, training=True)
        return [
            each if layer is None else _losses_of_zeros(layer, each)
            for layer, each in zip(of_made, made, strict=True)
        ]

    return compute


def _losses_of_zeros(layer, hidden):
    hidden = tf.reshape(hidden, [-1, hidden.shape[-1]])
    labels = tf.zeros(tf.shape(hidden)[:1], tf.int64)
    sample = layer.sample(labels)
    rows = [
        tf.zeros([tf.size(sample.ids), table.dim], hidden.dtype)
        for table in layer.tables
    ]
    return layer.sampled_losses(labels, hidden, [(sample, rows)])
