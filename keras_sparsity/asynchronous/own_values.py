"""Values that no rule updates, such as moving averages, of all workers."""

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity._tf import keras_models
from keras_sparsity.global_batch import random_states


class OwnValues:
    """A worker's own values within an epoch, at whose end they are combined.

    Workers begin an epoch with the same values.
    """

    def __init__(self, model):
        self._model = model
        self.begin_epoch()

    @property
    def variables(self):
        """All of them, frozen weights too; not the states of metrics."""
        of_metrics = {
            id(v) for metric in self._model.metrics for v in metric.variables
        }
        return [
            v
            for v in self._model.non_trainable_variables
            if id(v) not in of_metrics and not random_states.is_state(v)
        ]

    def begin_epoch(self):
        """From now on values change by this worker's batches."""
        frozen = keras_models.weights_that_were_trainable(self._model)
        frozen = {id(v) for v in frozen}
        # Without copies: TensorFlow assigns to a variable's new memory.
        self._begun = [
            (v, tf.convert_to_tensor(v.value))
            for v in self.variables
            if id(v) not in frozen
        ]

    def changed(self):
        """dict from the number of a variable to the value it has got."""
        found = {}
        for number, (variable, begun) in enumerate(self._begun):
            value = keras.ops.convert_to_numpy(variable)
            if not np.array_equal(value, keras.ops.convert_to_numpy(begun)):
                found[number] = value
        return found

    def combine(self, of_workers):
        """Takes what all workers' batches have made of the values.

        Args:
            of_workers: list of the number of each worker's batches, and its
                `changed`.
        """
        of_workers = [each for each in of_workers if each[0]]
        counts = [count for count, _ in of_workers]
        changes = [changed for _, changed in of_workers]
        for number in set().union(*changes):
            variable, begun = self._begun[number]
            begun = keras.ops.convert_to_numpy(begun)
            values = [changed.get(number, begun) for changed in changes]
            variable.assign(_combined(begun, np.stack(values), counts))


def _combined(begun, values, counts):
    """A value of each worker as one.

    Args:
        counts: the number of each worker's batches.
    """
    dtype = tf.as_dtype(begun.dtype)
    if dtype.is_floating:
        values = values.astype("float64")
        return np.average(values, 0, counts).astype(begun.dtype)
    if dtype.is_bool:
        return begun ^ (values ^ begun).any(0)
    return begun + (values - begun).sum(0, dtype=begun.dtype)
