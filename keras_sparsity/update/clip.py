"""Clips aggregated gradients, by norms over all owners."""

import tensorflow as tf

from keras_sparsity._tf import keras_optimizers


class Clipping:
    """Clips as a Keras optimizer is told to, after aggregation.

    Args:
        communicator: `Collectives` of all ranks.
        spread: list of the variables of which each rank holds a part only.

    References:
        EuroSys 4.3; arXiv 5.3.2.
    """

    def __init__(self, communicator, spread):
        self._communicator = communicator
        self._spread = spread

    def clip(self, rule, grads, updates):
        """The clipped gradients.

        Args:
            rule: the Keras optimizer.
            grads: list of tensors, the values to clip.
            updates: list of the `Update` of each.

        Returns:
            List of tensors.
        """
        if rule.clipvalue and rule.clipvalue > 0:
            limit = rule.clipvalue
            return [tf.clip_by_value(g, -limit, limit) for g in grads]
        if rule.clipnorm and rule.clipnorm > 0:
            squares = self.squared_norms(grads, updates)
            return [
                _scale_to(g, squares[id(u.whole)], rule.clipnorm)
                for g, u in zip(grads, updates, strict=True)
            ]
        if rule.global_clipnorm and rule.global_clipnorm > 0:
            squares = self.squared_norms(grads, updates)
            total = tf.add_n(list(squares.values()))
            return [_scale_to(g, total, rule.global_clipnorm) for g in grads]
        return grads

    def squared_norms(self, grads, updates):
        """Squared norm of each model variable's gradient, over all owners.

        Returns:
            Dictionary from the `id` of each of the model's variables.
        """
        squares = {id(v): tf.zeros([]) for v in self._spread}
        for gradient, update in zip(grads, updates, strict=True):
            square = tf.reduce_sum(tf.square(tf.cast(gradient, tf.float32)))
            key = id(update.whole)
            squares[key] = squares[key] + square if key in squares else square
        spread = [id(v) for v in self._spread]
        if spread and self._communicator.size > 1:
            # One number for each table, all in one message (EuroSys 4.3).
            (summed,) = self._communicator.all_reduce(
                [tf.stack([squares[key] for key in spread])],
                name="optimizer/norms",
            )
            squares.update(zip(spread, tf.unstack(summed), strict=True))
        return squares

    def take_part(self, rule):
        """Sends the norms of a rank that owns no row, as the others do."""
        if rule.clipnorm or rule.global_clipnorm:
            steps = rule.gradient_accumulation_steps or 1
            tf.cond(
                (keras_optimizers.iterations(rule).value + 1) % steps == 0,
                lambda: tf.add_n(list(self.squared_norms([], []).values())),
                lambda: tf.zeros([]),
            )

    def is_finite(self, updates):
        """Whether all gradients are finite on all ranks: a bool tensor."""
        finite = tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(u.values)) for u in updates]
        )
        if self._communicator.size > 1 and self._spread:
            (votes,) = self._communicator.all_reduce(
                [tf.cast(finite, tf.int32)], op="min", name="optimizer/finite"
            )
            finite = votes > 0
        return finite


def _scale_to(gradient, squared_norm, limit):
    norm = tf.sqrt(squared_norm)
    scale = limit / tf.maximum(norm, limit)
    return gradient * tf.cast(scale, gradient.dtype)
