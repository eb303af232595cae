"""Scales of losses, by the chain rule."""

import keras
import pytest
import tensorflow as tf

from keras_sparsity._tf import keras_losses
from keras_sparsity.global_batch import loss_scale


@pytest.mark.parametrize("replicas", [1, 4])
def test_value_and_gradient_have_a_scale_each(monkeypatch, replicas):
    monkeypatch.setattr(loss_scale, "num_replicas", lambda: replicas)
    local = tf.Variable(3.0)

    def of():
        with tf.GradientTape() as tape:
            value = loss_scale.with_slope(local * 2.0, 10.0, 4, 0.5)
        return float(value), float(tape.gradient(value, local))

    gradient = 2.0 * 0.5 * 4 / replicas
    assert of() == (10.0, gradient)
    with loss_scale.as_keras_multiplies():
        assert of() == (10.0 / replicas, gradient)
    assert of() == (10.0, gradient)


def test_losses_of_an_own_part_are_stock():
    if not keras_losses.losses_are_scaled():
        pytest.skip("Keras 3.5 divides no loss")
    loss = keras.losses.MeanSquaredError()

    class Replicas(tf.distribute.OneDeviceStrategy):
        num_replicas_in_sync = 4

    with Replicas("/cpu:0").scope():
        assert not loss_scale.is_of_own_part()
        assert float(loss([[0.0]], [[2.0]])) == 1.0
        with loss_scale.of_own_part():
            assert loss_scale.is_of_own_part()
            assert float(loss([[0.0]], [[2.0]])) == 4.0
        assert float(loss([[0.0]], [[2.0]])) == 1.0
