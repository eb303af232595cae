"""A rank that stops ends the training of all, behind the same epoch."""

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests.conftest import engines


class StopsOnRank1(keras.callbacks.Callback):
    """Behind the second epoch."""

    def on_epoch_end(self, epoch, logs=None):
        if ks.collectives.current().rank == 1 and epoch == 1:
            self.model.stop_training = True


def stopped(kind, options):
    """The losses of a `fit` that rank 1 stops behind its second epoch."""
    strategy = kind(**options)
    layers = [keras.layers.Dense(1) for _ in range(2)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    with strategy.scope():
        model.compile("sgd", "mse")

    x = np.ones((8, 2), "float32")
    options = {"batch_size": 4, "epochs": 4, "verbose": 0}
    return model.fit(x, x[:, :1], callbacks=[StopsOnRank1()], **options).history


_FIXED = {"synchronous": False, "max_staleness": 1, "delay": "fixed"}
CASES = {
    "synchronous": (ks.HybridStrategy, {}),
    "fixed delay": (ks.HybridStrategy, _FIXED),
    "stages": (ks.PipelineStrategy, {}),
}


@pytest.mark.parametrize("engine", engines(usually="native"))
@pytest.mark.parametrize("case", list(CASES))
def test_one_rank_stops_all(cluster, engine, case):
    first, second = cluster(engine, 2).run(stopped, *CASES[case])
    assert len(first["loss"]) == 2
    assert first == second
