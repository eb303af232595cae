"""Training by weights that are some steps old, in stock Keras.

The gradient of step t is that of the weights after the update of step
t - s - 1, by the definition: all versions of the weights are kept.
"""

import keras
import tensorflow as tf


def train(
    model, optimizer, loss, epochs, staleness, compensation=0.0, wire="float32"
):
    """Trains a model; returns the mean loss of each epoch.

    Args:
        model: a built Keras model without a strategy.
        optimizer: a stock Keras optimizer.
        loss: function of labels and predictions.
        epochs: list of lists of batches `(x, y)`.
        staleness: s. An epoch begins with the weights of all updates so far.
        compensation: how much of each gradient's square, times the distance
            that weights have moved since, is added to it.
        wire: the dtype to which the read weights and gradients are rounded.
    """

    def rounded(values):
        return [tf.cast(tf.cast(v, wire), v.dtype) for v in values]

    variables = model.trainable_variables
    optimizer.build(variables)
    means = []
    for batches in epochs:
        versions = [[v.numpy() for v in variables]]  # before update 0, 1, ...
        losses, sizes = [], []
        for step, (x, y) in enumerate(batches):
            read = rounded(versions[max(0, step - staleness)])
            value, gradients = _gradients(model, variables, read, loss, x, y)
            # All updates so far, and one more.
            _assign(variables, versions[step])
            gradients = [
                g + compensation * g**2 * (now - old)
                for g, now, old in zip(
                    rounded(gradients), versions[step], read, strict=True
                )
            ]
            optimizer.apply(gradients, variables)
            versions.append([v.numpy() for v in variables])
            losses.append(value * len(x))
            sizes.append(len(x))
        means.append(sum(losses) / sum(sizes))
    return means


def _gradients(model, variables, values, loss, x, y):
    _assign(variables, values)
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True))
    gradients = tape.gradient(value, [v.value for v in variables])
    # Stock Keras does not add up duplicate rows; the dense gradient has.
    return float(value), [tf.convert_to_tensor(g) for g in gradients]


def _assign(variables, values):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def batches(x, y, size):
    """The batches of one pass, in order."""
    return [
        (x[begin : begin + size], y[begin : begin + size])
        for begin in range(0, len(x), size)
    ]


RULES = {
    "sgd": lambda: keras.optimizers.SGD(0.3),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adagrad": lambda: keras.optimizers.Adagrad(0.2),
    "adam": lambda: keras.optimizers.Adam(0.05, epsilon=1e-3),
}
