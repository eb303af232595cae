"""Lion."""

import dataclasses

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import keras_optimizers
from keras_sparsity.update.closed_form.base import ClosedForm


@dataclasses.dataclass(frozen=True)
class Lion(ClosedForm):
    """Steps of the learning rate, against the sign of the momentum.

    Which stays, so that a row needs the sum of the learning rates alone. In
    narrow numbers a momentum may underflow, and stock Keras then stops: with
    `beta_2=0.99` in float32, after about 8,000 steps. Here it stays at the
    smallest number, as it does in stock Keras with wider numbers; else the
    result would depend on when a row is stored.

    Attributes:
        beta_2: the momentum's factor.
    """

    beta_2: float
    lasts = True

    @property
    def factors(self):
        return {keras_optimizers.MOMENTUMS: self.beta_2}

    @property
    def kernel(self):
        return np.ones((1, 1))

    def step_size(self, iterations, learning_rate, rule):
        del iterations, rule
        return learning_rate

    def moved(self, weights, slots, sums):
        return weights - tf.sign(slots[keras_optimizers.MOMENTUMS]) * sums[0]

    def slot_after(self, kind, slots, factor):
        before = slots[kind]
        after = super().slot_after(kind, slots, factor)
        smallest = np.finfo(before.dtype.as_numpy_dtype).tiny
        is_gone = tf.abs(after) < smallest
        return tf.where(is_gone, tf.sign(before) * smallest, after)
