"""The scale of a loss's value and gradient, which depends on its reader."""

import contextlib

import tensorflow as tf

from keras_sparsity._tf import contexts, patches

_OF_GLOBAL_BATCH, _DIVIDED, _OF_OWN_PART = range(3)
_modes = [_OF_GLOBAL_BATCH]  # the innermost last


def as_keras_multiplies():
    """While entered, values are divided by the number of replicas.

    Keras's own steps multiply them by it again.
    """
    return contexts.on_top(_modes, _DIVIDED)


@contextlib.contextmanager
def of_own_part():
    """While entered, Keras's losses are those of one process on this part.

    For losses within a loss, a layer or a metric: another sum combines the
    parts.
    """
    with contexts.on_top(_modes, _OF_OWN_PART), patches.losses_are_not_scaled():
        yield


def is_of_own_part():
    """Whether a loss is to be the stock one of this part."""
    return _modes[-1] == _OF_OWN_PART


def num_replicas():
    """By how many replicas the strategy around divides gradients, or 1.

    One loss object may be called with and without a strategy around it.
    """
    return tf.distribute.get_strategy().num_replicas_in_sync


def with_slope(local, value, size, slope):
    """`value`, whose gradient is `slope * size` times that of `local`.

    Under a strategy, the gradient is divided by the number of replicas. So is
    the value where Keras (3.6 and later) multiplies it again.

    Args:
        local: the loss of this rank's part.
        value: the value to show, of the same shape.
        size: the number of ranks.
        slope: a scalar.
    """
    replicas = num_replicas()
    divisor = replicas if _modes[-1] == _DIVIDED else 1

    @tf.custom_gradient
    def replace(local, value, slope):
        def gradient(upstream):
            return upstream * slope * (size / replicas), None, None

        return value / divisor, gradient

    return replace(local, tf.stop_gradient(value), tf.cast(slope, local.dtype))
