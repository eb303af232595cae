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
