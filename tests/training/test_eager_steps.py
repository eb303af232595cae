"""Eager steps of code that needs values: as under stock Keras."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests.conftest import engines

pytestmark = pytest.mark.smoke


def of_examples(y_true, y_pred):
    return np.abs(y_true.numpy() - y_pred.numpy()).mean(-1)


def of_batch(y_true, y_pred):
    """One number, of no single example: as scores of scikit-learn."""
    if len(y_true) < 2:
        raise ValueError("One example has no score.")
    return float(
        np.corrcoef(y_true.numpy().ravel(), y_pred.numpy().ravel())[0, 1]
    )


class Largest(keras.metrics.Metric):
    """The mean of the examples' largest errors, by NumPy."""

    def __init__(self):
        super().__init__(name="largest")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = np.abs(np.array(y_true) - np.array(y_pred)).max(-1)
        self.total.assign_add(float(errors.sum()))
        self.count.assign_add(float(len(errors)))

    def result(self):
        return self.total / self.count


def loss_of_values(y_true, y_pred):
    weights = np.where(y_true.numpy() > 0, 2, 1).astype("float32")
    return keras.ops.mean(weights * keras.ops.square(y_true - y_pred), -1)


class CallOfValues(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(2, kernel_initializer="ones")

    def call(self, x):
        return self.out(tf.constant(np.abs(x.numpy())))


def functional():
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(2, kernel_initializer="ones"),
        ]
    )


def trained(scope):
    """Logs and weights; the last batch is smaller than the ranks are."""
    x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
    data = x, x[:, :2]
    found = []
    for make in (functional, CallOfValues):
        model = make()
        with scope():
            model.compile(
                keras.optimizers.SGD(0.1),
                loss_of_values,
                metrics=[of_examples, of_batch, Largest(), "mae"],
                run_eagerly=True,
            )
        options = {"batch_size": 10, "shuffle": False, "verbose": 0}
        found.append(model.fit(*data, epochs=2, **options).history)
        options = {"batch_size": 10, "verbose": 0, "return_dict": True}
        found.append(model.evaluate(*data, **options))
        found.append(dict(enumerate(model.get_weights())))
    model = CallOfValues()
    with scope():
        model.compile("sgd", "mse", metrics=[of_batch], run_eagerly=True)
    data = [tf.constant(array) for array in data]  # else it is given arrays
    found.append(model.train_on_batch(*data, return_dict=True))
    return found


def trained_distributed():
    return trained(ks.HybridStrategy().scope)


@functools.cache
def trained_by_keras():
    return trained(contextlib.nullcontext)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_losses_metrics_and_calls_may_need_values(cluster, engine):
    for found in cluster(engine, 3).run(trained_distributed):
        for ours, theirs in zip(found, trained_by_keras(), strict=True):
            assert ours.keys() == theirs.keys()
            for name, values in theirs.items():
                np.testing.assert_allclose(
                    ours[name], values, 1e-4, 1e-6, err_msg=name
                )
