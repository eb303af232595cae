"""Adam, AdamW and AMSGrad; Adamax."""

import dataclasses

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import keras_optimizers
from keras_sparsity.update.closed_form import series
from keras_sparsity.update.closed_form.base import ClosedForm, as_float32


@dataclasses.dataclass(frozen=True)
class OfMoments(ClosedForm):
    r"""Steps of size :math:`a_j m_j / (s_j + \epsilon)`.

    The first moment m shrinks by `beta_1` in each step, s by `shrink`. With
    :math:`z = \epsilon / (s + \epsilon)` and :math:`q_i = shrink^i`,

    .. math:: \frac{1}{s q_i + \epsilon}
              = \frac{1}{s + \epsilon} \frac{1}{q_i + (1 - q_i) z}

    and the second factor is a polynomial in z, see `series.of_steps`. So a row
    needs the sums of :math:`a_{t+i} \beta_1^i` with its coefficients. They are
    few, for :math:`\beta_1^i` ends the sum where :math:`q_i` is still near 1.

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

    @property
    def kernel(self):
        return self._series[0]

    @property
    def _series(self):
        return series.of_steps(self.beta_1, self.shrink, self.tolerance)

    def scale(self, slots):
        """The slot s."""
        return tf.sqrt(slots[keras_optimizers.VELOCITIES])

    def moved(self, weights, slots, sums):
        epsilon = tf.constant(self.epsilon, weights.dtype)
        denominator = self.scale(slots) + epsilon
        # Not a product with 1 / x, which rounds by where an element stands in
        # its tensor: rows that are prefetched are to be the same bits.
        moment = slots[self.first_moment] / denominator
        if len(sums) == 1:
            return weights - moment * sums[0]
        root = self._series[1]
        if root == 1:
            x = 2 * epsilon / denominator - 1
        else:
            x = 2 * (epsilon / denominator) ** (1 / root) - 1
        return weights - moment * series.value(sums, x)

    first_moment = keras_optimizers.MOMENTUMS


class Adam(OfMoments):
    """Kingma & Ba, and AdamW with `weight_decay`."""

    @property
    def factors(self):
        return {
            keras_optimizers.MOMENTUMS: self.beta_1,
            keras_optimizers.VELOCITIES: self.beta_2,
        }

    def step_size(self, iterations, learning_rate, rule):
        del rule
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

    def step_size(self, iterations, learning_rate, rule):
        del rule
        power = as_float32(self.beta_1) ** (iterations + 1)
        return learning_rate / (1 - power)
