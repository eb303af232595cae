"""Ftrl."""

import dataclasses

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import keras_optimizers
from keras_sparsity.update.closed_form.base import NO_MARK, ClosedForm


@dataclasses.dataclass(frozen=True)
class Ftrl(ClosedForm):
    r"""Weights that each step works out anew from slots, which rest.

    .. math:: w = \frac{clip(l, -\lambda_1, \lambda_1) - l}
                       {n^{-p} / \eta_T + 2 \lambda_2 + \beta / \eta_T}

    in which only the learning rate of the last step changes. The initial
    weights do not count any more after the first step. Without
    :math:`\lambda_2`, w is proportional to the learning rate.

    Attributes:
        power: the rule's `learning_rate_power`, p.
        l1, l2, beta: the rule's.
    """

    power: float
    l1: float
    l2: float
    beta: float
    has_marks = True
    changes_new_rows = True

    @property
    def is_linear(self):
        return not self.l2

    @property
    def factors(self):
        return {
            keras_optimizers.ACCUMULATORS: 1.0,
            keras_optimizers.LINEARS: 1.0,
        }

    @property
    def kernel(self):
        return np.zeros((1, 1))

    def mark(self, iterations, learning_rate):
        del iterations
        return learning_rate

    def moved(self, weights, slots, sums):
        rate = sums[-1]
        linear = slots[keras_optimizers.LINEARS]
        accumulated = slots[keras_optimizers.ACCUMULATORS] ** -self.power
        l2 = self.l2 + self.beta / (2.0 * rate)
        clipped = tf.clip_by_value(linear, -self.l1, self.l1)
        moved = (clipped - linear) / (accumulated / rate + 2 * l2)
        return tf.where(rate == NO_MARK, weights, moved)
