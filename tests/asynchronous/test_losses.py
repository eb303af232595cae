"""The loss of a worker: the others end the epoch, each example counted."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest

from keras_sparsity import launch
from tests import asynchronous_losses as losses
from tests.conftest import engines


def _run(function, num_processes, engine, *args, num_servers=1):
    return launch.run(
        *(function, num_processes, engine, args),
        env={"KERAS_SPARSITY_TIMEOUT": "8"},
        num_servers=num_servers,
        timeout=240,
    )


def _check(results, victims, num_epochs=2):
    """Each batch was applied once in each epoch, and counted once."""
    left = [rank for rank in range(len(results)) if rank not in victims]
    for rank, result in enumerate(results):
        if rank in victims:
            assert result is None
            continue
        kernel, other, history, _, ranks = result
        np.testing.assert_array_equal(kernel, num_epochs)
        np.testing.assert_array_equal(other, num_epochs)
        mean = (losses.NUM_BATCHES - 1) / 2
        assert history["loss"] == [mean] * num_epochs
        assert history == results[left[0]][2]
        assert ranks == left


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_killed_workers_batches_go_to_others(engine):
    # Rank 0, too; variables are on both servers.
    results = _run(
        *(losses.at_step, 3, engine, [0, 2], "SIGKILL", 5), num_servers=2
    )
    _check(results, [0, 2])


def test_a_stopped_worker_is_left_behind():
    results = _run(losses.at_step, 2, "native", [1], "SIGSTOP", 3, False)
    _check(results, [1])


def test_the_launcher_says_it_in_one_line(tmp_path):
    done = subprocess.run(
        [
            *[sys.executable, "-m", "keras_sparsity.launch", "run", "-n", "2"],
            *["--servers", "1", "--log-dir", str(tmp_path)],
            *["-m", "tests.asynchronous_losses", "1"],
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "applied {2.0}" in done.stdout
    path = tmp_path / "rank-1.log"
    said = [s for s in done.stderr.splitlines() if "keras-sparsity:" in s]
    assert len(said) == 1
    assert said[0].startswith("keras-sparsity: rank 1 was killed by SIGKILL")
    assert said[0].endswith(f"(its output: {path}); others go on.")
    assert sorted(os.listdir(tmp_path)) == ["rank-1.log", "rank-2.log"]


@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP", "raise"])
@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("step", [1, 8])
def test_all_losses(engine, kind, is_known, step):
    results = _run(losses.at_step, 3, engine, [1], kind, step, is_known)
    _check(results, [1])


@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("seed", range(20))
def test_random_kills(engine, seed):
    chance = random.Random(seed)
    num_servers, victim = chance.randrange(1, 3), chance.randrange(3)
    seconds = chance.uniform(0, 0.6)
    results = _run(
        *(losses.at_any_time, 3, engine, [victim], seconds),
        num_servers=num_servers,
    )
    # Else the kill came after the end.
    assert results[victim] is None
    _check(results, [victim])
