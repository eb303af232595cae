"""A training that goes on from a checkpoint."""

import pytest
import tensorflow as tf

from keras_sparsity._tf import random_seeds
from keras_sparsity.checkpoint.found import FoundCheckpoint
from tests import checkpoint_functions as functions

STEPS = functions.NUM_EXAMPLES // functions.BATCH


def test_says_when_an_order_cannot_be_found_again(tmp_path, caplog):
    functions.train(tmp_path, kind="dataset", interrupt_after=STEPS + 4)
    functions.train(tmp_path, kind="dataset", seed=6)
    (said,) = [r.message for r in caplog.records if "seed" in r.message]
    assert "The random seed is 6, and was 5" in said
    assert "KERAS_SPARSITY_SEED=5" in said


def found_at(epoch, step, has_stopped=False):
    position = {
        "epoch": epoch,
        "step": step,
        "has_begun": True,
        "has_stopped": has_stopped,
        "callbacks": [],
        "seed": 5,
    }
    return FoundCheckpoint("folder", {"position": position}, epochs=2)


@pytest.mark.parametrize(
    ("epoch", "step", "seed", "is_told"),
    [
        (1, 3, 6, True),
        (1, 3, None, True),
        (1, 3, 5, False),
        (1, 0, 6, False),  # between epochs
        (2, 3, 6, False),  # of a training that has ended
    ],
)
def test_another_seed_is_told_within_an_epoch(
    monkeypatch, caplog, epoch, step, seed, is_told
):
    monkeypatch.setattr(random_seeds, "global_seed", lambda: seed)
    found_at(epoch, step).tell(is_first=False)
    assert ("The random seed is" in caplog.text) == is_told


@pytest.fixture
def no_global_seed():
    before = random_seeds.global_seed()
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(before)


@pytest.mark.parametrize(
    ("step", "seeds", "is_told"),
    [
        (3, [None], True),
        (3, [1, None], True),
        (3, [1], False),
        (3, [], False),
        (0, [None], False),  # between epochs
    ],
)
def test_a_shuffle_without_a_seed_is_told_of(
    no_global_seed, caplog, step, seeds, is_told
):
    dataset = tf.data.Dataset.range(8).batch(2).prefetch(1)
    for seed in seeds:
        dataset = dataset.shuffle(4, seed=seed).map(lambda x: x)
    found = found_at(1, step)
    found.position["seed"] = None
    found.tell(False, dataset)
    assert ("shuffle of the dataset has no seed" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("epoch", "has_stopped", "has_ended"),
    [(1, False, False), (2, False, True), (3, False, True), (1, True, True)],
)
def test_whether_the_training_had_ended(capsys, epoch, has_stopped, has_ended):
    found = found_at(epoch, 0, has_stopped)
    assert found.has_ended == has_ended
    found.tell(is_first=True)
    said = "had ended" if has_ended else f"in epoch {epoch + 1} after 0 of"
    assert said in capsys.readouterr().out
    found.tell(is_first=False)
    assert not capsys.readouterr().out
