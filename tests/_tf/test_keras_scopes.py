"""Each private name that is used, so that a new version says which broke."""

import keras
import pytest
import tensorflow as tf

from keras_sparsity._tf import keras_scopes

pytestmark = pytest.mark.smoke


def test_scopes_of_shapes():
    seen = []

    class Noting(keras.layers.Layer):
        def call(self, inputs):
            seen.append(
                (
                    keras_scopes.is_tracing_shapes(),
                    keras_scopes.in_symbolic_scope(),
                )
            )
            return inputs

    layer = Noting()
    layer(keras.Input((1,)))
    layer(tf.zeros([1, 1]))
    assert seen[0][0]
    assert seen[-1] == (False, False)


def test_a_call_without_effects():
    layer = keras.layers.BatchNormalization()
    layer.build((None, 1))
    with keras_scopes.tracing_shapes():
        layer(tf.ones([2, 1]), training=True)
        assert keras_scopes.is_tracing_shapes()
        assert keras_scopes.in_symbolic_scope()
    assert float(layer.moving_mean[0]) == 0.0
    assert not keras_scopes.is_tracing_shapes()
