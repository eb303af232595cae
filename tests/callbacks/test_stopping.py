"""A rank that stops ends the training of all, behind the same step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests.conftest import engines

# Where rank 1 stops, in the second of four epochs of four steps: behind one of
# them, or the epoch.
PLACES = {"nowhere": None, "first step": 0, "last step": 3, "epoch": "epoch"}


class StopsOnRank1(keras.callbacks.Callback):
    def __init__(self, where="epoch"):
        super().__init__()
        self._where, self._epoch, self.num_steps = PLACES[where], None, 0

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        self._stop(batch)

    def on_epoch_end(self, epoch, logs=None):
        self._stop("epoch")

    def _stop(self, where):
        is_here = (where, self._epoch) == (self._where, 1)
        if is_here and ks.collectives.current().rank == 1:
            self.model.stop_training = True


def stopped(kind, options, folder, knows_length=True):
    """Of `fit`s that rank 1 stops, and of those that go on from them.

    Returns:
        dict from the place where it stops to a list of the losses and the
        number of steps of each `fit`.
    """
    return {
        where: [
            _fit(kind(**options), where, f"{folder}/{where}", knows_length)
            for _ in range(2)
        ]
        for where in PLACES
    }


def _fit(strategy, where, folder, knows_length):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(1, "tanh", name=name) for name in "ab"]
    model = keras.Sequential([keras.Input((2,)), *layers])
    with strategy.scope():
        model.compile(keras.optimizers.Adam(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(16, 2)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
    if not knows_length:
        data = data.filter(lambda *_: True)
    stops = StopsOnRank1(where)
    history = model.fit(
        data,
        epochs=4,
        shuffle=False,
        verbose=0,
        callbacks=[ks.callbacks.ShardedCheckpoint(folder), stops],
    )
    return history.history["loss"], stops.num_steps


_FIXED = {"synchronous": False, "max_staleness": 1, "delay": "fixed"}
CASES = {
    "synchronous": (ks.HybridStrategy, {}),
    "fixed delay": (ks.HybridStrategy, _FIXED),
    "stages": (ks.PipelineStrategy, {"stages": ["a"], "schedule": "gpipe"}),
    "stages without a flush": (ks.PipelineStrategy, {"stages": ["a"]}),
}


@pytest.mark.parametrize("engine", engines(usually="native"))
@pytest.mark.parametrize("case", list(CASES))
def test_one_rank_stops_all(cluster, engine, case, tmp_path):
    first, second = cluster(engine, 2).run(stopped, *CASES[case], tmp_path)
    assert first == second
    # Where gradients of old weights wait, an epoch that is cut is over.
    _check(first, goes_on=case in ("synchronous", "stages"))


def test_epochs_of_unknown_length(cluster, tmp_path):
    told = *CASES["synchronous"], tmp_path, False
    first, second = cluster("native", 2).run(stopped, *told)
    assert first == second
    _check(first, goes_on=True)


def _check(found, goes_on):
    (whole, num_steps), _ = found["nowhere"]
    assert num_steps == 16
    # A stop at an epoch's end ends a training, one behind a step a run of it.
    assert found["epoch"] == [(whole[:2], 8), (whole[:2], 0)]
    for where, numbers in {"first step": (5, 6), "last step": (8,)}.items():
        (_, before), (losses, rest) = found[where]
        assert before in numbers and len(losses) == 4
        if goes_on:
            assert losses == pytest.approx(whole) and before + rest == 16


def with_another_rate(kind, options, schedules_alike):
    """The error of a `fit` whose ranks set learning rates of their own."""

    def rate(epoch):
        is_other = epoch == 1 and not schedules_alike
        return 0.1 + 0.1 * is_other * ks.collectives.current().rank

    layers = [keras.layers.Dense(1, name=name) for name in "ab"]
    model = keras.Sequential([keras.Input((2,)), *layers])
    with kind(**options).scope():
        model.compile("sgd", "mse")
    callbacks = [keras.callbacks.LearningRateScheduler(rate)]
    options = {"epochs": 3, "callbacks": callbacks, "verbose": 0}
    if schedules_alike:
        return len(model.fit(np.ones((8, 2)), np.ones(8), **options).epoch)
    with pytest.raises(ValueError) as caught:
        model.fit(np.ones((8, 2)), np.ones(8), **options)
    return str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_ranks_set_the_same_learning_rate(cluster, case):
    two = cluster("native", 2)
    assert two.run(with_another_rate, *CASES[case], True) == [3, 3]
    for message in two.run(with_another_rate, *CASES[case], False):
        assert "Received: rank 0: 0.1" in message
        assert "rank 1: 0.2" in message and "on every rank" in message
