"""Files of a model on several processes are those of one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests.conftest import engines
from tests.move_functions import Second

ROWS = 2000
IDS = np.arange(24).reshape(12, 2) * 7


class Kept(Second):
    """Its second optimizer is in a dictionary."""

    @property
    def second(self):
        return self.further["second"]


def second(folder):
    """Saves, and resumes, a model of two optimizers with slots."""
    keras.utils.set_random_seed(1)
    model = Kept(ks.layers.ShardedEmbedding(ROWS, 4, name="words"))
    model(IDS)
    with ks.HybridStrategy(architecture="hybrid").scope():
        model.compile(keras.optimizers.Adam(0.01), "mse")
        optimizer = ks.HybridOptimizer(keras.optimizers.Adam(0.01))
        model.further = {"second": optimizer}
    checkpoint = ks.callbacks.ShardedCheckpoint(f"{folder}/checkpoints")
    model.fit(
        *(IDS, np.ones((12, 1)), 6),
        shuffle=False,
        verbose=0,
        callbacks=[checkpoint],
    )
    model.save_weights(f"{folder}/saved.weights.h5")
    model.save(f"{folder}/saved.keras")
    rank = model.distribute_strategy.rank
    keras.saving.save_model(model, f"{folder}/by_function_{rank}.keras")
    keras.saving.save_weights(model, f"{folder}/of_rank_{rank}.weights.h5")
    return model.get_weights()


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_second_optimizers_slots_are_saved(cluster, engine, tmp_path):
    files = ["saved.weights.h5", "of_rank_0.weights.h5"]
    files += ["saved.keras", "by_function_0.keras"]
    loaded = Second(ks.layers.ShardedEmbedding(ROWS, 4, name="words"))
    loaded(IDS)
    for weights in cluster(engine, 2).run(second, str(tmp_path)):
        for file in files:
            loaded.load_weights(tmp_path / file)
            for one, other in zip(weights, loaded.get_weights(), strict=True):
                np.testing.assert_array_equal(one, other)
    assert not list(tmp_path.glob("*_1.*"))


def test_a_checkpoint_says_which_optimizers_it_leaves_out(tmp_path, caplog):
    second(tmp_path)
    (said,) = [
        record.message for record in caplog.records if "alone" in record.message
    ]
    assert "Received: 1 further optimizers (Adam)" in said


class Beside(keras.Sequential):
    """Its `save` writes a model that it holds."""

    def save(self, path):
        keras.saving.save_model(self.held, path)


def exported(folder):
    """Each process exports an ordinary model."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with ks.HybridStrategy().scope():
        model.compile("sgd", "mse")
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
    for name in ("first", "second"):
        model.export(f"{folder}/{name}", verbose=False)
    rank = model.distribute_strategy.rank
    keras.saving.save_model(model, f"{folder}/of_rank_{rank}.h5")
    beside = Beside([keras.Input((3,)), keras.layers.Dense(1)])
    with ks.HybridStrategy().scope():
        beside.compile("sgd", "mse")
    beside.held = model
    beside.save(f"{folder}/of_rank_{rank}.keras")
    return model.get_weights()


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_one_process_exports(cluster, engine, tmp_path):
    for kernel, bias in cluster(engine, 3).run(exported, str(tmp_path)):
        for name in ("first", "second"):
            loaded = tf.saved_model.load(tmp_path / name)
            served = loaded.serve(np.eye(3))
            np.testing.assert_allclose(served, kernel + bias, rtol=1e-6)
        for name in ("of_rank_0.h5", "of_rank_0.keras"):
            loaded = keras.saving.load_model(tmp_path / name, compile=False)
            np.testing.assert_array_equal(loaded.get_weights()[0], kernel)
    assert not list(tmp_path.glob("of_rank_[12]*"))
