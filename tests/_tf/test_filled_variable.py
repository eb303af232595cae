"""Variables whose first value is never stored twice."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf.current_variable import CurrentVariable, make_current
from keras_sparsity._tf.filled_variable import filled, filling

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_it_is_a_variable_like_others(dtype):
    variable = filled(3.0, (4, 2), dtype, name="slot")
    assert isinstance(variable, tf.Variable)
    assert (variable.name, variable.shape) == ("slot:0", (4, 2))
    assert variable.dtype == dtype
    np.testing.assert_array_equal(
        tf.cast(variable, tf.float32), np.full((4, 2), 3.0, np.float32)
    )
    variable[1:2].assign(tf.zeros((1, 2), dtype))
    assert tf.reduce_sum(tf.cast(variable, tf.int32)) == 18
    assert isinstance(make_current(variable), CurrentVariable)


def test_it_may_be_a_scalar():
    variable = filled(2.0, (), "float32")
    assert variable.shape == () and float(variable) == 2.0


@pytest.mark.parametrize("trainable", [True, False])
def test_tapes_watch_it_if_it_is_trainable(trainable):
    variable = filled(1.0, (3,), "float32", trainable)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * 2.0)
    gradient = tape.gradient(loss, variable)
    assert (gradient is not None) == trainable
    assert variable.trainable == trainable


def test_keras_makes_variables_of_it():
    with filling(3.0, (2, 1)) as nothing:
        variable = keras.Variable(
            nothing, shape=(2, 1), dtype="float64", name="slot"
        )
    assert (variable.name, variable.dtype) == ("slot", "float64")
    np.testing.assert_array_equal(variable, [[3.0], [3.0]])
    variable.assign([[1.0], [2.0]])
    np.testing.assert_array_equal(variable, [[1.0], [2.0]])


def test_it_is_made_in_any_trace():
    made = []

    @tf.function
    def step():
        if not made:
            made.append(filled(2.0, (2,), "float32"))
        return made[0] + 1.0

    np.testing.assert_array_equal(step(), [3.0, 3.0])
