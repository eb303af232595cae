"""Nadam."""

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import keras_optimizers
from keras_sparsity.update.closed_form import series
from keras_sparsity.update.closed_form.base import (
    ClosedForm,
    as_float32,
    powers,
)

# Of the schedule of beta_1.
_DECAY = 0.96
# From this step on, the tolerance holds for any s. Before, g changes much: for
# s near epsilon, the error is up to 1e-5 of the movement (in float32).
_FIRST_STEP = 10
_MOST_TERMS = 24


@dataclasses.dataclass(frozen=True)
class Nadam(ClosedForm):
    r"""Steps of size :math:`a_j m_j / (s_j + c_j \epsilon)`.

    As Adam's (`closed_form.adam`), but that
    :math:`c_j = \sqrt{1 - \beta_2^j}` does not multiply :math:`\epsilon` there.
    With that of the first step without a gradient,
    :math:`e = c_{t+1} \epsilon`, and :math:`z = e / (s + e)`,

    .. math:: \frac{1}{s q_i + c_{t+i} \epsilon}
              = \frac{1}{s + e} \frac{1}{q_i + (g_i - q_i) z},
              \qquad g_i = c_{t+i} / c_{t+1}

    whose Chebyshev series in z is geometric, with the ratio
    :math:`r_i = (\sqrt{g_i} - \sqrt{q_i}) / (\sqrt{g_i} + \sqrt{q_i})`.

    Attributes:
        beta_1, beta_2, epsilon: the rule's.
        tolerance: relative error of the series.
        scheduled_beta_1: the rule's beta_1 in its product of momentums, which
            is not rounded to float32.
    """

    beta_1: float
    beta_2: float
    epsilon: float
    tolerance: float
    scheduled_beta_1: float
    has_marks = True

    @property
    def factors(self):
        return {
            keras_optimizers.MOMENTUMS: self.beta_1,
            keras_optimizers.VELOCITIES: self.beta_2,
        }

    @property
    def kernel(self):
        return _kernel(self.beta_1, self.beta_2, self.tolerance)

    def step_size(self, iterations, learning_rate, rule):
        product = tf.cast(keras_optimizers.momentum_product(rule), tf.float64)
        step, decay = iterations + 1, as_float32(_DECAY)
        product *= self.scheduled_beta_1 * (1 - 0.5 * _DECAY**step)
        following = self.beta_1 * (1 - 0.5 * decay ** (step + 1))
        size = learning_rate * following / (1 - product * following)
        return size * self.mark(iterations, learning_rate)

    def mark(self, iterations, learning_rate):
        del learning_rate
        return tf.sqrt(1 - self.beta_2 ** (iterations + 1))

    def kernel_of(self, kernel, mark, marks):
        return _polynomials(
            *_weights(self.beta_1, self.beta_2, kernel.shape[0]),
            tf.sqrt(mark / marks)[:, None],
            kernel.shape[1],
        )

    def moved(self, weights, slots, sums):
        *sums, first, _ = sums
        s = tf.sqrt(slots[keras_optimizers.VELOCITIES])
        epsilon = first * self.epsilon
        moment = slots[keras_optimizers.MOMENTUMS] / (s + epsilon)
        x = 2 * epsilon / (s + epsilon) - 1
        return weights - moment * series.value(sums, x)


def _weights(beta_1, beta_2, num_steps):
    return powers(beta_1, num_steps), powers(beta_2**0.25, num_steps)


def _polynomials(weights, root_q, root_g, num_terms):
    """Coefficients of the powers of 2 z - 1: `(num_steps, num_terms)`."""
    orders = np.arange(num_terms)
    scale = weights / (root_q * root_g)
    ratio = (root_q - root_g) / (root_q + root_g)
    # The rest that is left out at z = 0, where nearly all rows are.
    rest = 2 * scale * (-ratio) ** num_terms / (1 + ratio)
    chebyshev = scale * ratio**orders * np.where(orders, 2.0, 1.0)
    chebyshev += rest * np.where(orders, 0.0, 1.0)
    return chebyshev @ series.to_powers(num_terms)


@functools.lru_cache(maxsize=64)
def _kernel(beta_1, beta_2, tolerance):
    """The kernel of late steps, with as many terms as early ones need."""
    if not beta_1:
        return np.zeros((1, 1))
    if beta_1**2 >= beta_2:
        return np.zeros((1, 0))
    count = series.num_steps(beta_1, np.sqrt(beta_2), tolerance)
    weights, root_q = _weights(beta_1, beta_2, count)
    steps = _FIRST_STEP + np.arange(count, dtype=np.float64)[:, None]
    c = np.sqrt(1 - beta_2**steps)
    g = c / c[0]
    ratio = (np.sqrt(g) - root_q) / (np.sqrt(g) + root_q)
    terms = ratio ** np.arange(_MOST_TERMS + 1) / (1 - ratio)
    left = (2 * weights / (np.sqrt(g) * root_q) * terms).sum(axis=0)
    is_enough = left <= tolerance * (weights / g).sum()
    num_terms = np.argmax(is_enough) if is_enough.any() else 0
    if not num_terms:
        return np.zeros((count, 0))
    return _polynomials(weights, root_q, 1.0, num_terms)
