"""The first step builds the model without reading a batch."""

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests.conftest import engines

pytestmark = pytest.mark.smoke


NUM_BATCHES = 7


READ_ONCE = {"shuffle": False, "steps_per_epoch": NUM_BATCHES, "verbose": 0}


def batches():
    """A generator that can be read once; its last batch is a short one."""
    rng = np.random.default_rng(5)
    for index in range(NUM_BATCHES):
        rows = 3 if index == NUM_BATCHES - 1 else 6
        x = rng.normal(size=(rows, 2)).astype("float32")
        yield x, x[:, :1] * 2 + 1


def model():
    keras.utils.set_random_seed(2)
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def fit_generator():
    distributed = model()
    with ks.HybridStrategy().scope():
        distributed.compile("sgd", "mse", metrics=["mae"])
    history = distributed.fit(batches(), **READ_ONCE).history
    return distributed.get_weights(), history


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_a_generator_is_read_once_and_whole(cluster, engine):
    stock = model()
    stock.compile("sgd", "mse", metrics=["mae"])
    expected = stock.fit(batches(), **READ_ONCE).history
    for weights, history in cluster(engine, 2).run(fit_generator):
        for ours, theirs in zip(weights, stock.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5)
