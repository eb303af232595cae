"""Each private name that is used, so that a new version says which broke."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf import keras_variables

pytestmark = pytest.mark.smoke


def test_saving_methods():
    for name in keras_variables.SAVING_METHODS:
        assert callable(getattr(keras.Variable, name))


def test_is_variable():
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    assert keras_variables.is_variable(layer.kernel)
    assert keras_variables.is_variable(keras.Variable(1.0))
    assert not keras_variables.is_variable(tf.Variable(1.0))


def test_copies_of_variables():
    variable = keras.Variable(np.arange(3.0), trainable=False, name="v")
    state = keras_variables.variable_state(variable)
    assert state.keys() == vars(variable).keys()
    state["_value"].assign(np.zeros(3))
    np.testing.assert_array_equal(variable, np.arange(3.0))
    assert state["_value"].name == variable.value.name
    assert not state["_value"].trainable


def test_a_variable_becomes_one_of_a_subclass():
    class Doubled(keras.Variable):
        def numpy(self):
            return 2 * super().numpy()

    layer = keras.layers.Embedding(3, 1, dtype="mixed_float16")
    layer.build()
    variable, (value,) = layer.embeddings, layer.get_weights()
    keras_variables.change_kind(variable, Doubled)
    assert layer.weights == [variable]
    np.testing.assert_array_equal(layer.get_weights()[0], 2 * value)
    with keras.src.backend.AutocastScope("float16"):
        assert variable.value.dtype == "float32"


def test_a_value_that_optimizers_know_as_another():
    rule = keras.optimizers.AdamW()
    variable, other = keras.Variable(1.0), keras.Variable(2.0)
    rule.exclude_from_weight_decay(var_list=[variable])
    assert rule._use_weight_decay(other)
    third = keras.Variable(3.0)
    keras_variables.take_identity(third.value, variable.value)
    assert not rule._use_weight_decay(third)


def test_a_plain_variable_like_one():
    layer = keras.layers.Embedding(
        3, 2, embeddings_regularizer="l2", embeddings_constraint="non_neg"
    )
    layer.build()
    value = np.ones((3, 2))
    made = keras_variables.plain_like(layer.embeddings, value)
    assert type(made) is keras.Variable
    np.testing.assert_array_equal(made, value)
    for name in ("path", "name", "regularizer", "constraint", "trainable"):
        assert getattr(made, name) == getattr(layer.embeddings, name), name
