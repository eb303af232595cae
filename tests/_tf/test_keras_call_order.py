"""Each private name that is used, so that a new version says which broke."""

import keras
import numpy as np
import pytest

from keras_sparsity._tf import keras_call_order, keras_functional

pytestmark = pytest.mark.smoke


class _Noting(keras.layers.Layer):
    """It notes the numbers that it is given."""

    def call(self, x):
        self.seen.append(float(x[0, 0]))
        return x + 1.0

    def compute_output_shape(self, input_shape):
        return input_shape


def _noting():
    layer = _Noting()
    layer.seen = []
    return layer


def _seen(layer, model, values):
    layer.seen.clear()
    model([np.full((1, 1), value) for value in values])
    return list(layer.seen)


@pytest.mark.parametrize("from_inputs", [True, False])
def test_the_order_of_calls_is_set(from_inputs):
    """Also where Keras copies them, as they take what others have made."""
    inputs = [keras.Input((1,)) for _ in range(2)]
    taken = inputs if from_inputs else [2.0 * each for each in inputs]
    layer = _noting()
    made = [layer(each) for each in taken]
    outputs = [layer(made[0] + made[1]), layer(made[1])]
    whole = keras_functional.functional_calls(keras.Model(inputs, outputs))
    calls = {id(call.outputs[0]): call for call in whole}
    add = next(call for call in whole if len(call.inputs) == 2)
    first, second, third, fourth = (calls[id(x)] for x in [*made, *outputs])
    model = keras.Model(taken, outputs)
    for order, seen in [
        ([first, second, add, third, fourth], [1.0, 5.0, 8.0, 6.0]),
        ([second, fourth, first, add, third], [5.0, 6.0, 1.0, 8.0]),
    ]:
        keras_call_order.set_order(model, order, outputs)
        assert _seen(layer, model, [1.0, 5.0]) == seen
        operations = [each.operation for each in keras_call_order.nodes(model)]
        assert operations == [call.operation for call in order]


def test_calls_with_one_state_stand_as_they_were_made():
    drop = keras.layers.Dropout(0.5, seed=1)
    layers = drop, keras.Sequential([keras.Input((2,)), drop])
    dense = keras.layers.Dense(2)
    inputs = keras.Input((2,))
    made = [layers[0](inputs), layers[1](inputs), dense(inputs)]
    model = keras.Model(inputs, made)
    calls = keras_functional.functional_calls(model)
    by_output = {id(call.outputs[0]): call for call in calls}
    first, second, other = (by_output[id(x)] for x in made)
    backwards = [other, second, first]
    found = keras_call_order.as_made(backwards, made)
    assert list(map(id, found)) == list(map(id, [other, first, second]))
    # Those that are not listed have no state.
    found = keras_call_order.as_made(backwards, made[1:])
    assert list(map(id, found)) == list(map(id, backwards))
