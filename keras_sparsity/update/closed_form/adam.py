"""Adam, AdamW and AMSGrad; Adamax."""

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import keras_optimizers
from keras_sparsity.update.closed_form.base import (
    ClosedForm,
    as_float32,
    num_steps_of,
)

# That the series below may take.
_MOST_TERMS = 12


@dataclasses.dataclass(frozen=True)
class OfMoments(ClosedForm):
    r"""Steps of size :math:`a_j m_j / (s_j + \epsilon)`.

    The first moment m shrinks by `beta_1` in each step, s by `shrink`. With
    :math:`u = s / (s + \epsilon)` and :math:`q_i = shrink^i`,

    .. math:: \frac{1}{s q_i + \epsilon}
              = \frac{1}{s + \epsilon} \sum_p u^p (1 - q_i)^p

    so that the sums are those of :math:`a_{t+i} \beta_1^i (1 - q_i)^p`. Few
    terms are enough, for :math:`\beta_1^i` ends the sum where :math:`q_i` is
    still near 1.

    Attributes:
        beta_1, beta_2, epsilon: the rule's.
        tolerance: relative error of the series.
    """

    beta_1: float
    beta_2: float
    epsilon: float
    tolerance: float

    @property
    def shrink(self):
        return np.sqrt(self.beta_2)

    @functools.cached_property
    def kernel(self):
        num_steps = num_steps_of(self.beta_1)
        i = np.arange(1, num_steps + 1, dtype=np.float64)[:, None]
        weights = self.beta_1**i
        gone = 1 - self.shrink**i
        terms = gone ** np.arange(_MOST_TERMS + 1)
        # What is left out, by the number of terms taken.
        left = (weights * terms / np.maximum(1 - gone, 1e-200)).sum(axis=0)
        is_enough = left <= self.tolerance * weights.sum()
        count = max(1, np.argmax(is_enough)) if is_enough.any() else 0
        return (weights * terms)[:, :count]

    def scale(self, slots):
        """The slot s."""
        return tf.sqrt(slots[keras_optimizers.VELOCITIES])

    def moved(self, weights, slots, sums):
        epsilon = tf.constant(self.epsilon, weights.dtype)
        inverse = 1 / (self.scale(slots) + epsilon)
        u = 1 - epsilon * inverse  # Of an infinite s, too.
        total = sums[-1]
        for value in reversed(sums[:-1]):
            total = total * u + value
        return weights - slots[self.first_moment] * inverse * total

    first_moment = keras_optimizers.MOMENTUMS


class Adam(OfMoments):
    """Kingma & Ba, and AdamW with `weight_decay`."""

    @property
    def factors(self):
        return {
            keras_optimizers.MOMENTUMS: self.beta_1,
            keras_optimizers.VELOCITIES: self.beta_2,
        }

    def step_size(self, iterations, learning_rate):
        step = iterations + 1
        return (
            learning_rate
            * tf.sqrt(1 - as_float32(self.beta_2) ** step)
            / (1 - as_float32(self.beta_1) ** step)
        )


class AMSGrad(Adam):
    """The largest second moment stays, and so does the denominator."""

    shrink = 1.0

    @property
    def factors(self):
        return {**super().factors, keras_optimizers.LARGEST_VELOCITIES: 1.0}

    def scale(self, slots):
        return tf.sqrt(self._largest(slots))

    def slot_after(self, kind, slots, factor):
        if kind == keras_optimizers.LARGEST_VELOCITIES:
            return self._largest(slots)
        return super().slot_after(kind, slots, factor)

    def _largest(self, slots):
        # Velocities that were set by hand may be larger.
        largest = slots[keras_optimizers.LARGEST_VELOCITIES]
        velocities = slots[keras_optimizers.VELOCITIES]
        return tf.maximum(largest, velocities * self.beta_2)


class Adamax(OfMoments):
    """The infinity norm shrinks by `beta_2`."""

    first_moment = keras_optimizers.ADAMAX_MOMENTS

    @property
    def shrink(self):
        return self.beta_2

    @property
    def factors(self):
        return {
            keras_optimizers.ADAMAX_MOMENTS: self.beta_1,
            keras_optimizers.ADAMAX_NORMS: self.beta_2,
        }

    def scale(self, slots):
        return slots[keras_optimizers.ADAMAX_NORMS]

    def step_size(self, iterations, learning_rate):
        power = as_float32(self.beta_1) ** (iterations + 1)
        return learning_rate / (1 - power)
