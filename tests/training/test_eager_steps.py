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
    """One number, of no rank's part: as scores of scikit-learn."""
    if len(y_true) in (1, 3, 4):
        raise ValueError("Few examples have no score.")
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
    for make in (functional, CallOfValues):
        metrics = [of_examples, keras.metrics.F1Score(name="late to build")]
        model = make()
        with scope():
            model.compile("sgd", "mse", metrics=metrics, run_eagerly=True)
        one = [array[:1] for array in data]
        found.append(model.evaluate(*one, verbose=0, return_dict=True))
        found.append(model.evaluate(*data, verbose=0, return_dict=True))
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


class StepOfAFunction(keras.Model):
    """Its eager steps call a function that is traced in the first ones."""

    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1, kernel_initializer="ones")
        self.mean = keras.metrics.Mean(name="mean")
        self.loss_of = keras.losses.MeanSquaredError()

    def call(self, x):
        return self.out(x)

    @tf.function
    def step(self, x, y):
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.loss_of(y, outputs)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, weights), weights, strict=True)
        )
        self.mean.update_state(tf.reduce_mean(tf.square(outputs - y)))

    def train_step(self, data):
        self.step(*data)
        return {"mean": self.mean.result()}


def train_by_function(scope, shard=lambda dataset: dataset):
    """Batches of one example, of few and of more: parts are of 0, 1 or 2.

    First of a dataset whose parts do not tell the size of the whole batch.
    """
    x = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
    batches = [
        (x[start:stop], x[start:stop, :1])
        for start, stop in ((0, 1), (1, 3), (3, 6), (6, 7), (7, 10))
    ]
    model = StepOfAFunction()
    model(x)
    with scope():
        model.compile(keras.optimizers.SGD(0.1), run_eagerly=True)
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(3)
    first = model.fit(shard(dataset), shuffle=False, verbose=0).history
    dataset = functools.reduce(
        tf.data.Dataset.concatenate,
        map(tf.data.Dataset.from_tensors, batches),
    )
    history = model.fit(dataset, epochs=2, shuffle=False, verbose=0).history
    return first["mean"] + history["mean"], model.get_weights()


def train_by_function_distributed():
    strategy = ks.HybridStrategy()
    return train_by_function(strategy.scope, strategy.shard)


def test_a_function_of_the_users_is_not_of_the_step_that_traced_it(cluster):
    losses, weights = train_by_function(contextlib.nullcontext)
    for found in cluster("native", 2).run(train_by_function_distributed):
        np.testing.assert_allclose(found[0], losses, 1e-5)
        for ours, theirs in zip(found[1], weights, strict=True):
            np.testing.assert_allclose(ours, theirs, 1e-5, 1e-6)
