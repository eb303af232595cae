"""Losses and metrics of outputs, in one process, as in stock Keras."""

import contextlib

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests import pipeline_functions

_SCHEDULES = ["1f1b", "spectrain"]


def _trained(model, compile_options, x, y, schedule=None):
    """The history of an epoch, with its validation, and `evaluate`'s logs."""
    scope = contextlib.nullcontext
    if schedule is not None:
        scope = ks.PipelineStrategy(schedule).scope
    with scope():
        model.compile(**compile_options)
    options = {"batch_size": len(x), "verbose": 0}
    history = model.fit(x, y, validation_data=(x, y), **options).history
    evaluated = model.evaluate(x, y, return_dict=True, **options)
    return {**{key: value[0] for key, value in history.items()}, **evaluated}


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_metrics_that_a_layer_holds(schedule):
    def trained(*schedule):
        layers = [
            keras.Input((1,)),
            pipeline_functions.Watch(),
            keras.layers.Dense(1),
        ]
        x = np.arange(8.0)[:, None]
        options = {"optimizer": keras.optimizers.SGD(0.0), "loss": "mse"}
        return _trained(keras.Sequential(layers), options, x, x, *schedule)

    assert trained()["seen"] == pytest.approx(3.5)
    assert trained(schedule)["seen"] == pytest.approx(3.5)


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_losses_use_logits(schedule):
    """Not probabilities, of which the smallest are cut."""

    def trained(*schedule):
        layer = keras.layers.Dense(
            2, activation="softmax", kernel_initializer="identity"
        )
        options = {
            "optimizer": keras.optimizers.SGD(0.0),
            "loss": "sparse_categorical_crossentropy",
            "metrics": [keras.metrics.SparseCategoricalCrossentropy(name="ce")],
        }
        return _trained(
            keras.Sequential([keras.Input((2,)), layer]),
            options,
            np.array([[0.0, 40.0]] * 8),
            np.zeros(8),
            *schedule,
        )

    stock = trained()
    assert stock["ce"] == pytest.approx(40.0)
    assert trained(schedule) == pytest.approx(stock)
