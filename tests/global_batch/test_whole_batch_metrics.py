"""Metric functions that return one number for a batch, against stock Keras."""

import functools

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests.conftest import engines

DIM, BATCH = 3, 5


def rmse(y_true, y_pred):
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y_true - y_pred)))


def gathered(y_true, y_pred):
    """The number of the batch's examples, by a function that gathers it."""
    return keras.ops.sum(keras.ops.ones_like(ks.gather_batch(y_pred)))


def of_examples(y_true, y_pred):
    return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)


def examples(count):
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, DIM)).astype("float32")
    return x, x.sum(1, keepdims=True) ** 2, rng.random(count)


def trained(compile_in, run_eagerly):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((DIM,)), keras.layers.Dense(1)])
    with compile_in:
        model.compile(
            "sgd",
            "mse",
            metrics=[
                rmse,
                lambda y, p: keras.ops.mean(keras.ops.abs(y - p)),
                keras.losses.Huber(name="huber"),
                gathered,
                of_examples,
            ],
            weighted_metrics=["mae"],
            run_eagerly=run_eagerly,
        )
    x, y, weights = examples(9)  # batches of 5 and 4
    history = model.fit(
        *(x, y, BATCH),
        epochs=2,
        sample_weight=weights,
        shuffle=False,
        verbose=0,
    ).history
    x, y, weights = examples(11)  # the last one of 1
    found = model.evaluate(
        x, y, BATCH, sample_weight=weights, verbose=0, return_dict=True
    )
    return list(history.items()), list(found.items())


@functools.cache
def expected():
    return trained(keras.name_scope("stock"), False)


def train():
    return [
        trained(ks.HybridStrategy().scope(), run_eagerly)
        for run_eagerly in (False, True)
    ]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_numbers_are_of_the_whole_batch(cluster, engine, size):
    for results in cluster(engine, size).run(train, timeout=200):
        for result in results:
            for found, stock in zip(result, expected(), strict=True):
                assert [name for name, _ in found] == [n for n, _ in stock]
                for (name, value), (_, of_stock) in zip(
                    found, stock, strict=True
                ):
                    np.testing.assert_allclose(
                        value, of_stock, rtol=1e-5, err_msg=name
                    )
