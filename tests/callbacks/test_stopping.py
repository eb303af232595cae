"""A rank that stops ends the training of all, behind the same epoch."""

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests.conftest import engines


class StopsOnRank1(keras.callbacks.Callback):
    """Behind the second epoch, or its last step."""

    def __init__(self, where="epoch"):
        super().__init__()
        self._where, self._epoch = where, None

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self._stop("step", batch)

    def on_epoch_end(self, epoch, logs=None):
        self._stop("epoch")

    def _stop(self, where, step=1):
        is_here = (where, step, self._epoch) == (self._where, 1, 1)
        if is_here and ks.collectives.current().rank == 1:
            self.model.stop_training = True


def stopped(kind, options, folder):
    """Losses of `fit`s that rank 1 stops, and of those that go on from them.

    A dict from the place where it stops.
    """
    strategy = kind(**options)
    layers = [keras.layers.Dense(1) for _ in range(2)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    with strategy.scope():
        model.compile("sgd", "mse")
    x = np.ones((8, 2), "float32")

    def fit(where, *callbacks):
        checkpoint = ks.callbacks.ShardedCheckpoint(f"{folder}/{where}")
        return model.fit(
            *(x, x[:, :1]),
            batch_size=4,
            epochs=4,
            verbose=0,
            callbacks=[checkpoint, *callbacks],
        ).history["loss"]

    return {
        where: (fit(where, StopsOnRank1(where)), fit(where))
        for where in ("epoch", "step")
    }


_FIXED = {"synchronous": False, "max_staleness": 1, "delay": "fixed"}
CASES = {
    "synchronous": (ks.HybridStrategy, {}),
    "fixed delay": (ks.HybridStrategy, _FIXED),
    "stages": (ks.PipelineStrategy, {}),
}


@pytest.mark.parametrize("engine", engines(usually="native"))
@pytest.mark.parametrize("case", list(CASES))
def test_one_rank_stops_all(cluster, engine, case, tmp_path):
    first, second = cluster(engine, 2).run(stopped, *CASES[case], tmp_path)
    assert first == second
    numbers = {
        where: [len(losses) for losses in found]
        for where, found in first.items()
    }
    # A stop at an epoch's end ends a training, one behind a step a run of it.
    assert numbers == {"epoch": [2, 2], "step": [2, 4]}
