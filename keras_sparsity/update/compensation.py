"""Gradients of old weights, corrected for how these have moved since."""

import tensorflow as tf

from keras_sparsity.placement import slices


def compensated(gradient, strength, now, read):
    """Nearly the gradient at the present weights, for one at older ones.

    It takes the square of the gradient, times `strength`, for the diagonal of
    the Hessian.

    Args:
        gradient: tensor.
        strength: number.
        now, read: the present weights, and those of the gradient.

    References:
        Asynchronous stochastic gradient descent with delay compensation
        (Zheng et al., ICML 2017), equation 10.
    """
    moved = tf.cast(now - read, gradient.dtype)
    moved = tf.ensure_shape(moved, gradient.shape)
    return gradient + strength * tf.square(gradient) * moved


def weights_of(update):
    """The weights to which the numbers of a gradient belong, as they are.

    Args:
        update: an `Update`, with one gradient for each row.
    """
    value = update.variable.value
    if isinstance(update.gradient, tf.IndexedSlices):
        return tf.gather(value, update.gradient.indices)
    return tf.convert_to_tensor(value)


def compensated_update(update, strength, read):
    """An update whose gradient is of the weights that were read.

    Args:
        update: `Update`.
        strength: see `compensated`.
        read: `weights_of` it, when its gradient was computed.
    """
    now = weights_of(update)
    return update.replaced(
        slices.mapped(
            lambda values: compensated(values, strength, now, read),
            update.gradient,
        )
    )
