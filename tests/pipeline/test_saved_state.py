"""Trainings in stages go on from checkpoints, also on other numbers."""

import functools
import json
import os
import pathlib
import re
import shutil

import h5py
import keras
import numpy as np
import pytest

from keras_sparsity import launch
from keras_sparsity.checkpoint import folder
from tests import forked, pipeline_functions
from tests.conftest import engines
from tests.pipeline import saved_state_functions as functions

_ROOT = str(pathlib.Path(__file__).parents[2])
# 8 steps an epoch, the last one of 3 examples; saved after 3 and 6 of them.
_NUM_EXAMPLES = 59
# Before the batch behind the save in the third epoch.
_STOPPED_BEFORE = 19
# The second of three has no weights.
_STAGES = {1: [], 2: ["dense_1"], 3: ["dense_0", "drop"]}


def _assert_same(left, right):
    """Two results of `functions.fit`, to the bit."""
    for value, other in zip(left[0], right[0], strict=True):
        np.testing.assert_array_equal(value, other)
    assert left[1].keys() == right[1].keys()
    for path, value in left[1].items():
        np.testing.assert_array_equal(value, right[1][path])
    assert left[2:] == right[2:]


def _check_resumed(ranks):
    for whole, stopped, resumed in ranks:
        _assert_same(whole, resumed)
        assert whole[2] == [0, 1, 2]
        assert np.abs(stopped[0][0] - whole[0][0]).max() > 1e-4
        rates = whole[3]["learning_rate"]
        np.testing.assert_allclose(rates, [rates[0]] * 2 + [0.1 * rates[0]])


@pytest.fixture(scope="module")
def resumed(cluster, tmp_path_factory):
    """`resumed(engine, schedule, rule)`: folder, and results by rank."""

    @functools.cache
    def resumed(engine, schedule, rule):
        path = tmp_path_factory.mktemp(f"{engine}_{schedule}_{rule}")
        ranks = cluster(engine, 2).run(
            *(functions.train_and_resume, "pipeline"),
            *((schedule, rule, _STAGES[2]), str(path)),
            *(_NUM_EXAMPLES, _STOPPED_BEFORE),
        )
        return path, ranks

    return resumed


@pytest.fixture(scope="module")
def divided(cluster, tmp_path_factory):
    """Folder and results of layer placement: a head on two workers."""
    path = tmp_path_factory.mktemp("divided")
    ranks = cluster("native", 3, has_groups=True).run(
        *(functions.train_and_resume, "divided", ("drop",), str(path)),
        *(_NUM_EXAMPLES, _STOPPED_BEFORE),
    )
    return path, ranks


_SCHEDULES = [
    ("native", "spectrain", "sgd"),
    *(
        pytest.param(engine, schedule, rule, marks=pytest.mark.all_cells)
        for engine, schedule, rule in [
            ("native", "vanilla", "adam"),
            ("native", "stash", "adam"),
            ("native", "gpipe", "adam"),
            ("native", "1f1b", "sgd"),
        ]
    ),
    pytest.param(
        *("horovod", "1f1b", "adam"), marks=engines("horovod")[0].marks
    ),
]


@pytest.mark.parametrize(("engine", "schedule", "rule"), _SCHEDULES)
def test_resumed_in_the_middle_of_an_epoch(resumed, engine, schedule, rule):
    _check_resumed(resumed(engine, schedule, rule)[1])


def test_each_rank_writes_its_stage_alone(resumed):
    path, ranks = resumed("native", "spectrain", "sgd")
    (name,) = folder.complete(path / "whole")[-1:]
    index = json.loads((path / "whole" / name / "index.json").read_text())
    network = pipeline_functions.made("line32")
    expected = {
        0: {"dense_0", "drop", "dense_1"},
        1: {"norm", "dense_2", "dense_3", "out"},
    }
    layers = {
        _plain(variable.path): layer.name
        for layer in network.layers
        for variable in layer.variables
    }
    for rank, names in expected.items():
        with h5py.File(path / "whole" / name / f"rank-{rank:05d}.h5") as file:
            records = [index["variables"][int(number)] for number in file]
        of_model = [
            _plain(r["name"]) for r in records if r["section"] == "model"
        ]
        assert sorted(of_model) == sorted(
            path for path, layer in layers.items() if layer in names
        )
        # A kernel's and a bias's average of each dense layer.
        of_rank = [r for r in records if r["section"] == "prediction"]
        assert len(of_rank) == (4 if rank == 0 else 8)
        of_metrics = [r for r in records if r["section"] == "metrics"]
        # A total and a count: of a layer; of the loss and the error.
        assert len(of_metrics) == (2 if rank == 0 else 4)
    with h5py.File(path / "whole" / name / "dense.h5") as file:
        assert not list(file)


def _plain(path):
    """Without the number of a name that Keras has made up."""
    return re.sub(r"^seed_generator_\d+/", "seed_generator/", path)


def test_on_other_numbers_of_stages(cluster, tmp_path):
    num_examples = 56  # the oracle has no stand-ins for missing examples
    first = str(tmp_path / "2")
    cluster("native", 2).run(
        *(functions.interrupted, first, num_examples, 10),
        *("1f1b", "adam", _STAGES[2]),
    )
    saved = keras.models.load_model(f"{first}/model.keras")
    slots = functions.slots_of(saved.optimizer)
    start = pipeline_functions.made("line32").get_weights()
    final, losses, _ = pipeline_functions.trained(
        "line32", "adam", num_examples
    )
    moved = _distance(start, final.values())
    assert moved > 0.1
    finals = []
    for size in (1, 3):
        path = str(tmp_path / str(size))
        shutil.copytree(first, path)
        arguments = path, num_examples, "1f1b", "adam", _STAGES[size]
        if size == 1:
            ranks = [functions.gone_on(*arguments)]
        else:
            ranks = cluster("native", size, has_groups=True).run(
                functions.gone_on, *arguments
            )
        found = set()
        for (weights, own), (trained, _, _, history) in ranks:
            for value, expected in zip(
                weights, saved.get_weights(), strict=True
            ):
                np.testing.assert_array_equal(value, expected)
            for name, value in own.items():
                np.testing.assert_array_equal(value, slots[name])
            found |= own.keys()
            distance = _distance(trained, final.values())
            assert distance <= 1e-5 * moved
            finals.append(trained)
            np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
        assert found == slots.keys()
    for other in finals[1:]:
        for value, expected in zip(other, finals[0], strict=True):
            np.testing.assert_array_equal(value, expected)


def test_losses_of_outputs_over_replicas(cluster, tmp_path):
    """Of which each rank counts its part of the batches."""
    for whole, resumed in cluster("native", 2).run(
        functions.losses_of_outputs, str(tmp_path)
    ):
        assert {"loss", "tokens_loss", "two_loss"} <= whole.keys()
        assert resumed == whole


def _distance(values, others):
    return np.sqrt(
        sum(
            np.square(value.astype("float64") - other).sum()
            for value, other in zip(values, others, strict=True)
        )
    )


def test_workers_that_draw_differently(divided):
    path, ranks = divided
    _check_resumed(ranks)
    (name,) = folder.complete(path / "whole")[-1:]
    found = []
    for rank in range(3):
        with h5py.File(path / "whole" / name / f"rank-{rank:05d}.h5") as file:
            found.append({number: value[()] for number, value in file.items()})
    # Of the second worker nothing but the state of its dropout.
    (state,) = found[1]
    assert found[0].keys() & found[1].keys() == {state}
    assert not np.array_equal(found[0][state], found[1][state])
    assert not found[0].keys() & found[2].keys()


# Whole kernels and slots are saved in `test_layer_placement.py`, too.
@pytest.mark.all_cells
def test_tails_that_divide_columns(cluster, tmp_path):
    """Files have whole kernels and slots."""
    arguments = "drop", 2, "columns"
    ranks = cluster("native", 4, has_groups=True).run(
        *(functions.train_and_resume, "divided", arguments, str(tmp_path)),
        *(_NUM_EXAMPLES, _STOPPED_BEFORE),
    )
    _check_resumed(ranks)


@pytest.mark.parametrize(
    ("schedule", "rule"),
    [
        ("spectrain", "sgd"),
        *(
            pytest.param(*each.values[1:], marks=pytest.mark.all_cells)
            for each in _SCHEDULES[1:-1]
        ),
    ],
)
def test_a_killed_rank_is_restarted(
    resumed, schedule, rule, tmp_path, capfd, monkeypatch
):
    _, ranks = resumed("native", schedule, rule)
    arguments = "kill", "pipeline", schedule, rule, *_STAGES[2]
    said = _check_restarted(ranks, arguments, tmp_path, capfd, monkeypatch)
    assert "rank 1 of 2 was killed by SIGKILL" in said


@pytest.mark.all_cells
def test_a_rank_that_raises_is_restarted(resumed, tmp_path, capfd, monkeypatch):
    schedule, rule = "spectrain", "sgd"
    _, ranks = resumed("native", schedule, rule)
    arguments = "raise", "pipeline", schedule, rule, *_STAGES[2]
    said = _check_restarted(ranks, arguments, tmp_path, capfd, monkeypatch)
    assert "ValueError: no such file: corpus.txt" in said


@pytest.mark.all_cells
def test_a_killed_worker_is_restarted(divided, tmp_path, capfd, monkeypatch):
    """Of layer placement: a head on two workers."""
    _, ranks = divided
    arguments = "kill", "divided", "drop"
    said = _check_restarted(ranks, arguments, tmp_path, capfd, monkeypatch)
    assert "rank 1 of 3 was killed by SIGKILL" in said


def _check_restarted(ranks, arguments, tmp_path, capfd, monkeypatch):
    """Restarted after a failure, a program ends as an undisturbed training.

    Args:
        ranks: what `train_and_resume` has given.
        arguments: the program's: how it fails, and of its model.
        tmp_path, capfd, monkeypatch: the fixtures.

    Returns:
        What it has said as errors.
    """
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")])),
    )
    with forked.ranks():
        code = launch.main(
            [
                *("run", "-n", str(len(ranks)), "--engine", "native"),
                *("--max-restarts", "1", "-m", functions.__name__),
                *(str(tmp_path), str(_NUM_EXAMPLES), str(_STOPPED_BEFORE)),
                *arguments,
            ]
        )
    said = capfd.readouterr()
    assert code == 0, said.err
    assert "going on in epoch 3 after 3 of its steps" in said.out
    for rank, (whole, *_) in enumerate(ranks):
        found = np.load(tmp_path / f"rank_{rank}.npz")
        for number, value in enumerate(whole[0]):
            np.testing.assert_array_equal(found[f"arr_{number}"], value)
        for path, value in whole[1].items():
            np.testing.assert_array_equal(found[path], value)
    return said.err
