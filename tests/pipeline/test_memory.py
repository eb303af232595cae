"""`memory_bytes` refuses what `ks.plan` says is more."""

import gc
import weakref

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from keras_sparsity.pipeline.memory import Limit, passing_bytes
from keras_sparsity.stages.turns import Turns
from tests.pipeline import memory_functions


@pytest.mark.parametrize(
    ("schedule", "model"),
    [
        ("1f1b", "nested"),
        pytest.param("stash", "masks", marks=pytest.mark.all_cells),
    ],
)
def test_limit(cluster, schedule, model):
    ranks = cluster("native", 2).run(memory_functions.limited, schedule, model)
    for of_stages, trained, messages in ranks:
        # `tests/pipeline/test_plan.py` compares them with sums by hand.
        assert of_stages == ranks[0][0]
        most = max(of_stages)
        number = of_stages.index(most)
        assert trained
        in_step, at_compile = messages
        assert f"Stage {number}, of the layers" in in_step
        assert f"holds {most:,} bytes in a step of 8 examples" in in_step
        assert f"memory_bytes={most - 1:,}" in in_step
        assert "bytes without the activations" in at_compile
        assert "memory_bytes=100" in at_compile


def test_a_limit_goes_with_its_model(monkeypatch):
    """TensorFlow keeps Python functions that steps call (`numpy_function`)."""
    limits = []
    checked = Limit.checked

    def noted(limit, data):
        limits.append(weakref.ref(limit))
        return checked(limit, data)

    monkeypatch.setattr(Limit, "checked", noted)

    def train():
        strategy = ks.PipelineStrategy("1f1b", memory_bytes=10**9)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        with strategy.scope():
            model.compile("sgd", "mse")
        model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)

    train()
    gc.collect()
    assert limits and all(limit() is None for limit in limits)


def test_inputs_wait_longer_than_messages():
    """Those that have been read wait for the messages of their mini-batch."""
    turns = Turns(3, messages_ahead=True)
    read, received, made = 10, 100, 1_000
    of_last = passing_bytes(None, 2, turns, 4, read, received, made)
    # Read four turns before; of one micro-batch at a time.
    assert of_last == 4 * (5 * read + 2 * received) + made
    of_middle = passing_bytes(None, 1, turns, 4, read, received, made)
    # Four more wait for their backward passes.
    assert of_middle == 4 * (7 * read + 6 * received + made)
