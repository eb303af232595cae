"""Each private name that is used, so that a new version says which broke."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf import keras_losses

pytestmark = pytest.mark.smoke


def test_resolve_loss():
    assert keras_losses.resolve_loss(None) is None
    assert keras_losses.resolve_loss("mse").name == "mse"
    y_true, y_pred = tf.zeros([2]), tf.zeros([2, 3])
    loss = keras_losses.resolve_loss("crossentropy", y_true, y_pred)
    assert loss.fn is keras.losses.sparse_categorical_crossentropy


def test_match_ranks():
    values, weights = keras_losses.match_ranks(tf.zeros([4]), tf.zeros([4, 1]))
    assert values.shape == weights.shape == (4, 1)


def test_keras_mask():
    embedded = keras.layers.Embedding(3, 2, mask_zero=True)(np.array([[0, 1]]))
    np.testing.assert_array_equal(
        keras_losses.keras_mask(embedded), [[False, True]]
    )
    assert keras_losses.keras_mask(tf.zeros([1])) is None


def test_set_keras_mask():
    tensor = tf.zeros([2, 1])
    keras_losses.set_keras_mask(tensor, tf.constant([True, False]))
    np.testing.assert_array_equal(
        keras_losses.keras_mask(tensor), [True, False]
    )


def test_keras_logits():
    logits = tf.constant([[50.0]])
    outputs = keras.activations.sigmoid(logits)
    np.testing.assert_array_equal(keras_losses.keras_logits(outputs), logits)
    assert keras_losses.keras_logits(tf.zeros([1])) is None


def test_set_keras_logits():
    tensor = tf.ones([1, 1])
    keras_losses.set_keras_logits(tensor, tf.constant([[50.0]]))
    loss = keras.losses.binary_crossentropy(tf.zeros([1, 1]), tensor)
    np.testing.assert_allclose(loss, [50.0])  # clipped: 16


def test_losses_are_scaled():
    is_old = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 8)
    assert keras_losses.losses_are_scaled() is not is_old


def test_what_is_added_to_the_loss():
    model = keras.Sequential([keras.layers.Dense(1, kernel_regularizer="l2")])
    model.compile("sgd", "mse")
    model.build((None, 1))
    with keras_losses.losses_replaced(model, [tf.constant(3.0)]):
        assert [float(loss) for loss in model.losses] == [3.0]
    assert float(model.losses[0]) < 3.0
    if keras_losses.ADDED_LOSS:
        added = []
        stock = getattr(model, keras_losses.ADDED_LOSS)
        with mock.patch.object(
            model,
            keras_losses.ADDED_LOSS,
            lambda loss: (added.append(loss), stock(loss))[1],
            create=True,
        ):
            y = tf.zeros([1, 1])
            model.compute_loss(y=y, y_pred=y)
        assert len(added) == 1
    else:
        assert int(keras.__version__.split(".")[1]) < 8


def test_the_arguments_of_a_losss_function():
    arguments = keras_losses.function_arguments
    assert arguments(keras.losses.CosineSimilarity(axis=0))["axis"] == 0
    assert arguments(keras.losses.CosineSimilarity())["axis"] == -1
    assert arguments(keras.losses.Dice(axis=(0, 2)))["axis"] == (0, 2)
    assert arguments(keras.losses.Dice()).get("axis") is None
    assert arguments(keras.losses.Loss()) == {}


def test_the_metrics_of_compile_and_their_functions():
    def scaled(y_true, y_pred, factor):
        return factor * (y_true - y_pred)

    metric = keras.metrics.MeanMetricWrapper(scaled, factor=2.0)
    assert keras_losses.metric_function(metric)(5.0, 2.0) == 6.0
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=[metric])
    compiled = keras_losses.compiled_metrics(model)
    assert keras_losses.is_compiled_metrics(compiled)
    assert not keras_losses.is_compiled_metrics(metric)
