"""Measurements go on without calls that refuse their examples."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.stages import refusals, timing
from keras_sparsity.stages.cutting import Cutter


def _with_lookup():
    """Its lookup refuses texts that it does not know, such as empty ones."""
    text = keras.Input((2,), dtype="string")
    ids = keras.layers.StringLookup(
        vocabulary=["a", "b", "c"], mask_token=None, num_oov_indices=0
    )(text)
    rows = keras.layers.Embedding(3, 4)(ids)
    return keras.Model(text, keras.layers.Dense(1)(rows))


def _measure(function, tensors):
    """The inputs of a pass, and its gradients."""
    return tensors, timing.traced(function, tensors)(*tensors)


@pytest.fixture
def sizes_as_times(monkeypatch):
    """A pass takes as long as its first tensor is large."""

    def median_seconds(function, tensors):
        timing.traced(function, tensors)
        return float(tf.size(tensors[0]))

    monkeypatch.setattr(timing, "median_seconds", median_seconds)


def test_calls_that_refuse_drawn_inputs(sizes_as_times):
    cutter = Cutter(_with_lookup())
    # The start of a pass does not count: 1.
    assert timing.call_seconds(cutter, 3) == [1e-6, 5.0, 23.0]
    inputs, gradients = timing.whole_seconds(cutter, 3, measure=_measure)
    assert inputs[0].shape == (3, 2)
    assert [each.shape for each in gradients] == [(3, 4), (4, 1), (1,)]


def test_memory_that_is_not_there_is_no_refusal():
    def call(x):
        raise tf.errors.ResourceExhaustedError(None, None, "no memory")

    inputs = keras.Input((2,))
    layer = keras.layers.Lambda(call, output_shape=(2,))
    cutter = Cutter(keras.Model(inputs, layer(inputs)))
    with pytest.raises(tf.errors.ResourceExhaustedError, match="no memory"):
        timing.call_seconds(cutter, 3)


def test_inputs_are_those_of_a_batch(sizes_as_times):
    """As many as are asked for; a batch that is refused is an error."""
    model = _with_lookup()
    batch = tf.constant([["a", "b"], ["c", "a"]])
    cutter = Cutter(model, batch)
    assert timing.call_seconds(cutter, 3) == [5.0, 5.0, 23.0]
    for number in 1, 3:
        inputs, _ = timing.whole_seconds(cutter, number, measure=_measure)
        expected = [[b"a", b"b"], [b"c", b"a"], [b"a", b"b"]]
        np.testing.assert_array_equal(inputs[0], expected[:number])
    cutter = Cutter(model, tf.constant([["a", "unknown"]]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="unknown"):
        timing.whole_seconds(cutter, 3)


class _Refusing(keras.layers.Layer):
    refuses = False

    def call(self, x):
        if self.refuses:
            raise ValueError("refused")
        return x


def test_zeros_in_place_of_calls():
    inputs = keras.Input((1,))
    refusing = _Refusing()
    model = keras.Model(inputs, refusing(2.0 * inputs) + 3.0)
    refusing.refuses = True
    numbers = []

    def zeros(number):
        numbers.append(number)
        return [tf.zeros([1, 1])]

    tensors = [tf.ones([1, 1])]
    compute = refusals.replaced(
        lambda tensors: [model(tensors[0])], model, zeros, tensors
    )
    assert numbers == [1]
    refusing.refuses = False
    (found,) = tf.function(compute)(tensors)
    np.testing.assert_array_equal(found, [[3.0]])
