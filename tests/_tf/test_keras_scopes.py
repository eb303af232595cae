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


def test_the_model_that_is_called():
    seen = []

    class Noting(keras.layers.Layer):
        def call(self, inputs):
            seen.append(keras_scopes.called_model())
            return inputs

    layer = Noting()
    inner = keras.Sequential([keras.Input((1,)), layer])
    outer = keras.Sequential([keras.Input((1,)), inner])
    for each in (outer, inner, layer):
        each(tf.zeros([1, 1]))
    assert seen[-3] is outer
    assert seen[-2] is inner
    assert seen[-1] is None
    assert keras_scopes.called_model() is None


def test_a_call_without_effects():
    layer = keras.layers.BatchNormalization()
    layer.build((None, 1))
    with keras_scopes.tracing_shapes():
        layer(tf.ones([2, 1]), training=True)
        assert keras_scopes.is_tracing_shapes()
        assert keras_scopes.in_symbolic_scope()
    assert float(layer.moving_mean[0]) == 0.0
    assert not keras_scopes.is_tracing_shapes()


def test_values_that_a_stateless_scope_gives():
    given, other = keras.Variable([1.0]), keras.Variable([1.0])
    assert not keras_scopes.is_given(given)
    with keras.StatelessScope([(given, tf.constant([2.0]))]):
        assert keras_scopes.is_given(given)
        assert not keras_scopes.is_given(other)


def test_variables_in_their_own_dtype_within_a_layer():
    found = []

    class Reading(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(2, 2), name="kernel")

        def call(self, inputs):
            found.append(self.kernel.value.dtype)
            with keras_scopes.without_autocast():
                found.append(self.kernel.value.dtype)
            return inputs

    Reading(dtype="mixed_bfloat16")(tf.ones([1, 2]))
    assert found == [tf.bfloat16, tf.float32]
