"""What one process computes: stock Keras, fed the dense gradient."""

import keras
import numpy as np
import tensorflow as tf


@keras.saving.register_keras_serializable(package="tests")
class DenseGradients(keras.optimizers.Optimizer):
    """A stock optimizer that gets every gradient as a dense tensor.

    Stock Keras never adds the duplicate rows of `IndexedSlices` before the
    rule is applied; the dense tensor is the mathematical gradient.
    """

    def __init__(self, inner):
        super().__init__(learning_rate=0.0, name="dense_gradients")
        self.inner = inner

    def build(self, variables):
        self.inner.build(variables)
        super().build(variables)

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(list(trainable_variables))
        grads = [
            tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g
            for g in grads
        ]
        self.inner.apply(grads, trainable_variables)

    @property
    def learning_rate(self):
        return self.inner.learning_rate

    @learning_rate.setter
    def learning_rate(self, value):
        self.inner.learning_rate = value

    def finalize_variable_values(self, var_list):
        self.inner.finalize_variable_values(var_list)


def dense_reference(model, optimizer, **compile_arguments):
    """Compiles a stock model with an optimizer fed dense gradients."""
    model.compile(optimizer=DenseGradients(optimizer), **compile_arguments)


def zipf_ids(rng, high, shape):
    """Ids below `high`, frequent ones repeated, as words of a text are."""
    ids = rng.zipf(1.3, size=shape) - 1
    return np.where(ids < high, ids, rng.integers(0, high, size=shape))


def relative_difference(start, end, other):
    """Largest difference of each variable, in distances it has moved.

    Args:
        start: list of arrays, the weights before training.
        end: the reference's weights after training.
        other: the weights to judge.

    Returns:
        List of floats, one for each variable.
    """
    return [
        float(np.abs(b - c).max() / max(np.abs(b - a).max(), 1e-12))
        for a, b, c in zip(start, end, other, strict=True)
    ]
