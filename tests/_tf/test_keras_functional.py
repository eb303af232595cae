"""Each private name that is used, so that a new version says which broke."""

import keras
import numpy as np
import pytest
from keras.src.ops import core

from keras_sparsity._tf import keras_functional, keras_losses

pytestmark = pytest.mark.smoke


def test_calls_of_a_functional_model_in_their_order():
    first, second = keras.Input((2,)), keras.Input((2,))
    layer = keras.layers.Dense(2)
    hidden = layer(first + second)
    outputs = layer(hidden)
    model = keras.Model([first, second], outputs)
    functional = keras_functional.functional_of(model)
    assert functional is model
    (add, one, two) = keras_functional.functional_calls(functional)
    assert not isinstance(add.operation, keras.Layer)
    assert [id(x) for x in add.inputs] == [id(first), id(second)]
    assert one.operation is two.operation is layer
    assert one.outputs[0] is hidden and two.arguments[0] is hidden
    assert two.outputs[0] is outputs

    class Own(keras.Model):
        pass

    assert keras_functional.functional_of(Own([first, second], hidden)) is None
    sequential = keras.Sequential([layer])
    assert keras_functional.functional_of(sequential) is None
    sequential.build((None, 2))
    functional = keras_functional.functional_of(sequential)
    (call,) = keras_functional.functional_calls(functional)
    assert call.operation is layer
    assert [id(x) for x in call.inputs] == [id(x) for x in sequential.inputs]


def test_inputs_stay():
    first, second = keras.Input((2,)), keras.Input((2,))
    hidden = keras.layers.Dense(2)(first)
    outputs = keras.layers.Add()([hidden, second])
    model = keras.Model([first, second], outputs)
    config = model.get_config()
    with keras_functional.inputs_stay(model):
        keras.Model([hidden, second], outputs)
    assert model.get_config() == config


def test_next_run_calls():
    inputs = keras.Input((2,))
    layer = keras.layers.Identity()
    model = keras.Model(inputs, layer(layer(inputs) + 1.0))
    begun, seen = [], []

    def begin(inputs):
        begun.append(inputs)

        def call(number, operation, *args):
            seen.append(number)
            return operation(*args) * 2.0

        return call

    functional = keras_functional.functional_of(model)
    with keras_functional.next_run_calls(functional, begin):
        np.testing.assert_array_equal(model(np.ones((1, 2))), [[12.0, 12.0]])
        # The next run alone.
        np.testing.assert_array_equal(model(np.ones((1, 2))), [[2.0, 2.0]])
    assert seen == [0, 1, 2] and len(begun) == 1
    with keras_functional.next_run_calls(functional, begin):
        pass
    np.testing.assert_array_equal(model(np.ones((1, 2))), [[2.0, 2.0]])


def test_is_stateless():
    inputs = keras.Input((3,))
    noise = keras.random.SeedGenerator(1)

    def of(outputs):
        (call,) = keras_functional.functional_calls(
            keras.Model(inputs, outputs)
        )
        return keras_functional.is_stateless(call)

    def add_noise(row):
        return row + keras.random.normal((), seed=noise)

    class Own(keras.Operation):
        def call(self, x):
            return add_noise(x)

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    ops = keras.ops
    assert of(inputs * 3) and of(inputs[:, :1]) and of(ops.mod(inputs, 2))
    assert not of(ops.map(add_noise, inputs))
    if hasattr(core, "VectorizedMap"):  # not in Keras 3.5
        assert not of(ops.vectorized_map(add_noise, inputs))
    assert not of(Own()(inputs))
    assert not of(keras.layers.Lambda(add_noise)(inputs))
    # A compiled model has a dict by its layers, which have no order.
    compiled = keras.Sequential([keras.layers.Dense(1), keras.layers.ReLU()])
    compiled.compile()
    assert not of(compiled(inputs))


def test_calls_of_nested_models():
    inner = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(3, name="dense")], name="inner"
    )
    inputs = keras.Input((2,))
    outputs = keras.layers.Dense(1, name="dense")(inner(inputs))
    model = keras.Model(inputs, outputs)
    calls, made = keras_functional.flat_calls(model)
    assert [call.name for call in calls] == ["inner/dense", "dense"]
    first, second = calls
    assert first.operation is inner.layers[0]
    assert first.inputs[0] is model.inputs[0]
    assert second.inputs[0] is first.outputs[0]
    assert [id(x) for x in made] == [id(x) for x in second.outputs]
    assert [layer.name for layer in inner.layers] == ["dense"]
    # The model has its own calls still.
    assert model.outputs[0] is outputs
    with keras_functional.named({call.operation: call.name for call in calls}):
        flat = keras.Model(model.inputs, made[0])
    x = np.ones((4, 2))
    np.testing.assert_array_equal(flat([x]), model(x))


class _Inheriting(keras.layers.Dense):
    """It calls as `Dense` does."""


class _Doubling(keras.layers.Dense):
    def call(self, inputs, training=None):
        return 2 * super().call(inputs, training=training)


@pytest.mark.parametrize(
    ("make", "carries"),
    [
        (keras.layers.Dense(3, "softmax"), True),
        (keras.layers.Dense(3, "sigmoid"), True),
        (keras.layers.Dense(3, "tanh"), False),
        (_Inheriting(3, "softmax"), True),
        (_Doubling(3, "softmax"), False),
        (keras.layers.EinsumDense("abc,cd->abd", (None, 3), "softmax"), True),
        (keras.layers.Activation("softmax"), True),
        (keras.layers.Softmax(axis=1), True),
        (keras.layers.Conv1D(3, 1, activation="sigmoid"), True),
        (keras.layers.Conv2D(3, 1, activation="softmax"), True),
        (keras.layers.Conv1DTranspose(3, 1, activation="softmax"), True),
        (keras.layers.SeparableConv1D(3, 1, activation="softmax"), True),
        (keras.ops.sigmoid, True),
        (keras.activations.sigmoid, True),
        (keras.ops.softmax, True),
        (lambda x: keras.ops.softmax(x, axis=1), True),
        (keras.ops.tanh, False),
    ],
)
def test_logits_make_the_output_again(make, carries):
    inputs = keras.Input((2, 3))
    if isinstance(make, keras.layers.Conv2D):
        inputs = keras.Input((2, 1, 3))
    model = keras.Model(inputs, make(inputs))
    *_, call = keras_functional.functional_calls(model)
    function = keras_functional.logits_function(call)
    assert (function is not None) == carries
    outputs = model(np.linspace(-9.0, 9.0, 24).reshape(4, *inputs.shape[1:]))
    logits = keras_losses.keras_logits(outputs)
    assert (logits is not None) == carries
    if carries:
        again = function(logits)
        np.testing.assert_array_equal(again, outputs)
        assert keras_losses.keras_logits(again) is logits
