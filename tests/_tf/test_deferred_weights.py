"""Weights that get their first values late get the same ones."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf import deferred_weights

pytestmark = pytest.mark.smoke

_LAYERS = {
    "dense": lambda: keras.layers.Dense(4),
    "orthogonal": lambda: keras.layers.LSTM(4, return_sequences=True),
    "statistics": lambda: keras.layers.BatchNormalization(),
    "attention": lambda: keras.layers.MultiHeadAttention(2, 3),
    "given": lambda: keras.layers.Dense(
        4,
        kernel_initializer=keras.initializers.RandomNormal(seed=5),
        bias_initializer=keras.initializers.Constant(2.0),
    ),
}


def _made(name):
    keras.utils.set_random_seed(1)
    x = keras.Input((3, 4))
    layer = _LAYERS[name]()
    y = layer(x, x) if name == "attention" else layer(x)
    return keras.Model(x, keras.layers.Dense(2)(y))


@pytest.mark.parametrize("name", _LAYERS)
def test_values_are_the_same(name):
    expected = _made(name).get_weights()
    with deferred_weights.deferring():
        model = _made(name)
        held = [v for v in model.weights if v._value is not None]
        # A function of an LSTM's own gives them.
        assert len(held) == (name == "orthogonal")
        # Reads need no stored values.
        _check(model.get_weights(), expected)
        few = model.weights[:1]
        deferred_weights.initialize(few)
        deferred_weights.initialize(few)
        assert [v._value is None for v in model.weights[:2]] == [False, True]
    assert isinstance(model.weights[-1].value, tf.Variable)
    _check(model.get_weights(), expected)
    model.compile("adam", "mse")
    model.fit(np.ones((2, 3, 4)), np.ones((2, 3, 2)), verbose=0)


@pytest.mark.parametrize("is_assigned", [False, True])
def test_layers_that_are_frozen_then_may_be_trained_later(is_assigned):
    with deferred_weights.deferring():
        model = _made("dense")
        values = model.get_weights()
        model.trainable = False
        if is_assigned:
            model.set_weights(values)
    assert not any(v.trainable for v in model.weights)
    model.trainable = True
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(np.ones((2, 3, 4))))
    gradients = tape.gradient(loss, [v.value for v in model.weights])
    assert all(gradient is not None for gradient in gradients)


def test_assigned_values_stay():
    given = [np.full(w.shape, 3.0) for w in _made("dense").get_weights()]
    with deferred_weights.deferring():
        model = _made("dense")
        model.set_weights(given)
        assert all(v._value is not None for v in model.weights)
    _check(model.get_weights(), given)


def test_values_that_may_differ_later_are_made_at_once():
    draws = np.random.default_rng(0)

    def drawn(shape, dtype):
        return draws.normal(size=shape).astype(dtype)

    class OfOwnDraws(keras.initializers.RandomNormal):
        pass

    seed = keras.random.SeedGenerator(3)
    initializers = [
        drawn,
        OfOwnDraws(),
        keras.initializers.RandomNormal(seed=seed),
    ]
    with deferred_weights.deferring():
        for initializer in initializers:
            layer = keras.layers.Dense(2, kernel_initializer=initializer)
            layer.build((None, 3))
            assert layer.kernel._value is not None
            assert layer.bias._value is None


def test_keras_initializes_none_of_them_with_its_own():
    with deferred_weights.deferring():
        layer = keras.layers.Dense(2)
        layer.build((None, 3))
        with keras.StatelessScope():
            other = keras.Variable("zeros", shape=(2,))
        assert other._value is not None
        assert layer.kernel._value is None


def _check(values, expected):
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, other)
