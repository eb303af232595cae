"""What an optimizer decides by the gradients of all stages together."""

import keras
import tensorflow as tf


class Together:
    """Norms and finiteness over all ranks, where there is a flush.

    Args:
        optimizer: the rank's optimizer.
        collectives: `Collectives` of all ranks.
    """

    def __init__(self, optimizer, collectives):
        self._optimizer, self._collectives = optimizer, collectives
        scaling = keras.optimizers.LossScaleOptimizer
        self._may_skip = isinstance(optimizer, scaling)
        rule = optimizer.inner_optimizer if self._may_skip else optimizer
        self._largest_norm = getattr(rule, "global_clipnorm", None)

    def scaled(self, loss):
        """The loss whose gradients the optimizer takes."""
        return self._optimizer.scale_loss(loss)

    def agreed(self, gradients):
        """Gradients with which each rank's optimizer decides as one for all.

        Args:
            gradients: list of the rank's, as `stage.merged` returns it.

        Returns:
            Where the loss is scaled and any rank's gradients are not finite:
            gradients that are not. Else gradients whose norm over all ranks is
            at most `global_clipnorm`, so that clipping a rank's by themselves
            changes nothing.
        """
        if not (self._may_skip or self._largest_norm):
            return gradients
        given = [
            tf.cast(getattr(gradient, "values", gradient), tf.float32)
            for gradient in gradients
            if gradient is not None
        ]
        scale = self.scaled(tf.ones([]))
        zero = tf.zeros([])
        num_bad = tf.add_n(
            [zero, *(tf.reduce_sum(_is_bad(each)) for each in given)]
        )
        squares = tf.add_n(
            [zero, *(tf.reduce_sum(tf.square(x / scale)) for x in given)]
        )
        num_bad, squares = self._collectives.all_reduce(
            [num_bad, squares], name="pipeline/norm"
        )
        factor = tf.ones([])
        if self._largest_norm:
            factor = self._largest_norm / tf.maximum(
                tf.sqrt(squares), self._largest_norm
            )
        if self._may_skip:
            factor = tf.where(num_bad > 0, float("nan"), factor)
        return [_times(gradient, factor) for gradient in gradients]


def _is_bad(values):
    return tf.cast(~tf.math.is_finite(values), tf.float32)


def _times(gradient, factor):
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            _times(gradient.values, factor),
            gradient.indices,
            gradient.dense_shape,
        )
    return gradient * tf.cast(factor, gradient.dtype)
