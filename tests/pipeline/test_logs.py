"""Logs of two stages are those of stock Keras."""

import contextlib

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests import pipeline_functions


def watched(schedule=None):
    """The history of a model both of whose stages have a metric "seen"."""
    keras.utils.set_random_seed(3)
    layers = [
        pipeline_functions.Watch(),
        keras.layers.Dense(4, name="first"),
        pipeline_functions.Watch(),
        keras.layers.Dense(2),
    ]
    model = keras.Sequential([keras.Input((6,)), *layers])
    scope = contextlib.nullcontext
    if schedule is not None:
        scope = ks.PipelineStrategy(schedule, ["first"]).scope
    with scope():
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=["mae"])
    x, y = pipeline_functions.data("dense", 16)
    return model.fit(x, y, 8, validation_data=(x, y), verbose=0).history


@pytest.mark.parametrize("schedule", ["1f1b", "vanilla"])
def test_a_metric_of_one_name_in_several_stages(cluster, schedule):
    """Keras shows the last one."""
    expected = watched()
    assert abs(expected["seen"][0]) > 0.01
    for history in cluster("native", 2).run(watched, schedule):
        assert history.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-4)
