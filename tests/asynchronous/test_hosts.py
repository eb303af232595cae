"""Processes on other machines than the launcher's are lost, and come back.

The machines are network namespaces, which root alone may make.
"""

import ast
import os
import pathlib
import re
import subprocess
import sys

import _namespaces
import pytest

from tests import asynchronous_losses as losses
from tests import asynchronous_returns as returns
from tests.conftest import engines

_ROOT = str(pathlib.Path(__file__).parents[2])


@pytest.fixture
def machines():
    try:
        with _namespaces.Machines(2, 0, 0, 1500) as made:
            yield made
    except _namespaces.ClusterError as error:
        pytest.skip(str(error))


def _check(machines, folder, engine, hosts, function, *arguments):
    options = ["--hosts", hosts, "--ssh", machines.ssh_command()]
    options += ["--engine", engine, "--max-restarts", "1"]
    options += ["--log-dir", folder / "logs"]
    # Others wait so long for a rank that stands still. On a busy machine they
    # might for a first step, which is traced.
    options += ["--rank-timeout", "15"] * ("SIGSTOP" in arguments)
    call = [function.__module__, function.__name__, repr(str(folder))]
    done = subprocess.run(
        machines.command(
            None,
            [sys.executable, "-m", "keras_sparsity.launch", "run"]
            + [*options, "-m", *call, *map(repr, arguments)],
        ),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": _ROOT},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = [s for s in done.stderr.splitlines() if "keras-sparsity: " in s]
    assert len(said) == 1 and said[0].endswith("it starts anew: 1 of 1.")
    (found,) = map(ast.literal_eval, re.findall("losses (.*)", done.stdout))
    # Each batch was counted once in each epoch.
    assert found == [(losses.NUM_BATCHES - 1) / 2] * len(found)


# One machine has two processes, so that Horovod has groups of them.
_UNEQUAL = "10.0.0.1:1+1,10.0.0.2:1"


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_a_lost_worker_of_another_host_joins_again(machines, engine, tmp_path):
    call = losses.rejoined, 1, "SIGKILL"
    _check(machines, tmp_path, engine, _UNEQUAL, *call)
    assert (tmp_path / "ranks").read_text() == "[0, 1, 2]\n" * 3


@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
def test_a_stopped_worker_of_another_host_does(machines, engine, tmp_path):
    call = losses.rejoined, 0, "SIGSTOP"
    _check(machines, tmp_path, engine, _UNEQUAL, *call)


@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("victim", [2, 3])
def test_a_server_of_another_host_does(machines, engine, victim, tmp_path):
    hosts = "10.0.0.1:1+1,10.0.0.2:1+1"
    call = returns.killed, [victim], 1, [5]
    _check(machines, tmp_path, engine, hosts, *call)
