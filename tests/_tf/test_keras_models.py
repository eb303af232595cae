"""Each private name that is used, so that a new version says which broke."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf import keras_losses, keras_models

pytestmark = pytest.mark.smoke


def test_all_layers():
    inner = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    layers = keras_models.all_layers(keras.Sequential([inner]))
    assert inner in layers
    assert inner.layers[0] in layers


def test_set_distribute_strategy():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    strategy = tf.distribute.OneDeviceStrategy("/cpu:0")
    keras_models.set_distribute_strategy(model, strategy)
    assert model.distribute_strategy is strategy


@pytest.mark.parametrize(
    "name",
    [
        keras_models.SYMBOLIC_BUILD,
        keras_models.RESULTS_OR_LOGS,
        keras_losses.STEP_LOSS,
    ],
)
def test_keras_calls_what_adoption_binds(name):
    """In `fit`, with the arguments that the bound method takes."""
    if name == keras_losses.STEP_LOSS and not keras_losses.losses_are_scaled():
        return  # not bound there
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with tf.distribute.get_strategy().scope():
        model.compile("sgd", "mse")
    keras_models.set_distribute_strategy(model, tf.distribute.get_strategy())
    stock = getattr(model, name)
    calls = []

    def bound(*args, **kwargs):
        calls.append(sorted(kwargs))
        return stock(*args, **kwargs)

    object.__setattr__(model, name, bound)
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    assert calls
    if name == keras_models.SYMBOLIC_BUILD:
        assert calls == [["iterator"]]


def test_weights_that_were_trainable():
    frozen = keras.layers.Dense(1)
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dropout(0.5),
            keras.layers.BatchNormalization(),
            frozen,
        ]
    )
    frozen.trainable = False
    found = keras_models.weights_that_were_trainable(model)
    normalized = model.layers[1]
    expected = [normalized.gamma, normalized.beta, frozen.kernel, frozen.bias]
    assert {id(v) for v in found} == {id(v) for v in expected}


def test_compile_state():
    fresh = vars(keras.Sequential())
    for name, value in keras_models.COMPILE_STATE.items():
        assert fresh.get(name) == value, name
    model = keras.Sequential([keras.layers.Dense(1)])
    assert keras_models.compile_arguments(model) == {}
    model.compile("sgd", "mse", metrics=["mae"])
    arguments = keras_models.compile_arguments(model)
    assert arguments["loss"] == "mse" and arguments["metrics"] == ["mae"]
    inspect.signature(keras.Model.compile).bind(
        model, **arguments, auto_scale_loss=False
    )
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    changed = {n for n, v in vars(model).items() if fresh.get(n) != v}
    assert {"compiled", "train_function", "_compile_loss"} <= changed


def test_place_of_a_layer():
    inputs = keras.Input((3,))
    layer = keras.layers.Dense(2)
    outputs = layer(inputs)
    assert set(keras_models.LAYER_PLACE) <= set(vars(layer))
    assert keras_models.built_with(layer) == {"input_shape": (None, 3)}
    assert keras_models.built_with(keras.layers.Dense(2)) == {}
    assert not keras_models.calls_with_more_arguments(layer, "weights")
    attention = keras.layers.Attention()
    attention([outputs, outputs])
    assert not keras_models.calls_with_more_arguments(attention, "mask")
    attention([outputs, outputs], mask=[outputs, outputs])
    assert keras_models.calls_with_more_arguments(attention, "mask")


class OfValues(keras.Model):
    """Needs values: the value of a symbol raises."""

    def __init__(self, name):
        super().__init__()
        self.out = keras.layers.Dense(1)
        self.needs_values = name

    def call(self, x):
        self._needs(x, "call")
        return self.out(x)

    def loss_of(self, y_true, y_pred):
        self._needs(y_true, "loss")
        return keras.losses.mean_squared_error(y_true, y_pred)

    def _needs(self, tensor, name):
        if self.needs_values == name:
            tensor.numpy()


def test_a_symbolic_build_of_code_that_needs_values():
    batch = tf.zeros([2, 3]), tf.zeros([2, 1])
    model = OfValues("loss")
    model.compile("sgd", model.loss_of, metrics=[model.loss_of])
    keras_models.set_distribute_strategy(model, tf.distribute.get_strategy())
    build = getattr(model, keras_models.SYMBOLIC_BUILD)
    with pytest.raises(AttributeError, match="numpy"):
        build(data_batch=batch)
    assert not keras_models.is_built(model)
    with keras_models.losses_and_metrics_may_fail(model):
        build(data_batch=batch)
    assert keras_models.is_built(model)


def test_can_be_called_on_shapes():
    batch = tf.zeros([2, 3]), tf.zeros([2, 1])
    assert keras_models.can_be_called_on_shapes(OfValues(None), batch[0])
    model = OfValues("call")
    model.compile("sgd", "mse", metrics=["mae"])
    assert not keras_models.can_be_called_on_shapes(model, batch[0])
    model(batch[0])
    keras_models.set_distribute_strategy(model, tf.distribute.get_strategy())
    with keras_models.losses_and_metrics_wait(model):
        getattr(model, keras_models.SYMBOLIC_BUILD)(data_batch=batch)
    assert model.optimizer.built
    assert not keras_models.is_built(model)
