"""The death of a server: it alone goes back to its last checkpoint."""

import json
import random
import re

import numpy as np
import pytest

from tests import asynchronous_returns as returns
from tests.asynchronous_losses import NUM_BATCHES
from tests.conftest import engines

# Of two workers and two servers.
_FIRST, _SECOND = 2, 3
_EPOCHS = 3


def _launch(
    launched, folder, engine, function, *args, options=(), num_servers=2
):
    options = ["--max-restarts", "1", "--engine", engine, *options]
    call = function, str(folder), *args
    return launched(folder / "logs", num_servers, options, *call)


def _check_losses(output):
    """Each batch was counted once in each epoch."""
    mean = (NUM_BATCHES - 1) / 2
    assert f"losses {[mean] * _EPOCHS}" in output


def _processes(folder):
    """The numbers of processes that each rank had."""
    pids = returns.Pids(str(folder))
    ranks = range(len(list(folder.glob("*.pids"))))
    return [len(pids.of(rank)) for rank in ranks]


def _iterations(folder):
    return int((folder / "iterations").read_text())


def _counts(folder, name):
    """How often batches were applied at the server that died, and others."""
    return map(np.array, json.loads((folder / name).read_text()))


@pytest.mark.parametrize("engine", engines(usually="native"))
@pytest.mark.parametrize("victim", [_FIRST, _SECOND])
def test_a_server_comes_back_alone(launched, engine, victim, tmp_path):
    call = returns.killed, [victim], 1, [5]
    code, output, said = _launch(launched, tmp_path, engine, *call)
    assert code == 0, said
    assert len(said) == 1 and said[0].endswith("it starts anew: 1 of 1.")
    begins = f"keras-sparsity: rank {victim} was killed by SIGKILL"
    assert said[0].startswith(begins)
    _check_losses(output)
    assert _processes(tmp_path) == [1 + (rank == victim) for rank in range(4)]
    # Of the checkpoint, while the other server's are later ones.
    own, others = _counts(tmp_path, "restored")
    np.testing.assert_array_equal(own, 1)
    assert set(others) == {1, 2}
    own, others = _counts(tmp_path, "ended")
    np.testing.assert_array_equal(others, _EPOCHS)
    # Nothing is lost but that server's updates since the checkpoint.
    assert set(own) == {_EPOCHS - 1, _EPOCHS}
    log = (tmp_path / "logs" / f"rank-{victim}.log").read_text()
    assert "epoch-00001-step-0000000: going on in epoch 2" in log
    # With 2 workers, a bound of 3 steps, and each one's push under way.
    for rank in (0, 1):
        assert int((tmp_path / f"{rank}.staleness").read_text()) <= 8


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_the_only_server_comes_back_alone(launched, engine, tmp_path):
    call = returns.killed, [_FIRST], 1, [5]
    code, output, said = _launch(
        launched, tmp_path, engine, *call, num_servers=1
    )
    assert code == 0, said
    assert len(said) == 1 and said[0].endswith("it starts anew: 1 of 1.")
    _check_losses(output)
    assert _processes(tmp_path) == [1, 1, 2]
    own, _ = _counts(tmp_path, "restored")
    np.testing.assert_array_equal(own, 1)
    own, _ = _counts(tmp_path, "ended")
    assert set(own) == {_EPOCHS - 1, _EPOCHS}
    # It begins with the updates that were lost, which no other server counts.
    assert _iterations(tmp_path) == _EPOCHS * NUM_BATCHES


@pytest.mark.parametrize("engine", engines(usually="native"))
@pytest.mark.parametrize("dies", [False, True])
def test_a_push_without_an_answer_counts_once(launched, engine, dies, tmp_path):
    call = returns.unanswered, dies
    code, output, said = _launch(
        launched, tmp_path, engine, *call, num_servers=1
    )
    assert code == 0, said
    assert len(said) == 1 + dies
    assert all(line.endswith("it starts anew: 1 of 1.") for line in said)
    _check_losses(output)
    assert _processes(tmp_path) == [1, 1 + dies, 2]
    assert _iterations(tmp_path) == _EPOCHS * NUM_BATCHES


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_without_the_scheduler_all_start_anew(launched, engine, tmp_path):
    call = (returns.without_scheduler,)
    code, output, said = _launch(
        launched, tmp_path, engine, *call, num_servers=1
    )
    assert code == 0, said
    assert len(said) == 1 and said[0].endswith("restart 1 of 1.")
    _check_losses(output)
    assert _processes(tmp_path) == [2, 2, 2]
    log = (tmp_path / "logs" / "rank-1.log").read_text()
    assert "the scheduler is gone" in log


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_a_server_comes_back_again(launched, engine, tmp_path):
    call = returns.killed, [_SECOND], 2, [3, 6, 9]
    options = ["--max-restarts", "3"]
    code, output, said = _launch(
        launched, tmp_path, engine, *call, options=options
    )
    assert code == 0, said
    assert [line[-7:] for line in said] == ["1 of 3.", "2 of 3.", "3 of 3."]
    _check_losses(output)
    assert _processes(tmp_path) == [1, 1, 1, 4]
    own, others = _counts(tmp_path, "ended")
    np.testing.assert_array_equal(others, _EPOCHS)
    assert set(own) == {_EPOCHS - 1, _EPOCHS}


@pytest.mark.parametrize("victim", [_FIRST, _SECOND])
def test_before_a_checkpoint_all_start_anew(launched, victim, tmp_path):
    call = returns.killed, [victim], 0, [5]
    code, output, said = _launch(launched, tmp_path, "native", *call)
    assert code == 0, said
    assert len(said) == 1
    expected = rf"rank {victim} of 4 was killed by SIGKILL.*restart 1 of 1\."
    assert re.search(expected, said[0])
    _check_losses(output)
    assert _processes(tmp_path) == [2, 2, 2, 2]
    for counts in _counts(tmp_path, "ended"):
        np.testing.assert_array_equal(counts, _EPOCHS)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_server_without_restarts_left_ends_all(launched, engine, tmp_path):
    call = returns.killed, [_SECOND], 1, [5, 8]
    code, _, said = _launch(launched, tmp_path, engine, *call)
    assert code == 137
    assert said[0].endswith("it starts anew: 1 of 1.")
    assert "it does not start anew" in said[1]
    assert "rank 3 of 4 was killed by SIGKILL" in said[2]
    assert _processes(tmp_path) == [1, 1, 1, 2]


def _check_ended(folder):
    """Batches were applied at the second server again, or once less."""
    own, others = _counts(folder, "ended")
    np.testing.assert_array_equal(others, _EPOCHS)
    assert set(own) <= {_EPOCHS - 1, _EPOCHS}


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_worker_and_a_server_die_together(launched, engine, tmp_path):
    call = returns.killed, [1, _SECOND], 1, [5]
    code, output, said = _launch(launched, tmp_path, engine, *call)
    assert code == 0, said
    assert len(said) == 2
    assert all(line.endswith("it starts anew: 1 of 1.") for line in said)
    _check_losses(output)
    assert _processes(tmp_path) == [1, 2, 1, 2]
    _check_ended(tmp_path)


@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
def test_a_stopped_server_comes_back(launched, engine, tmp_path):
    call = returns.killed, [_SECOND], 1, [5], "SIGSTOP"
    # The others, too, are to go on within it when the server has come back.
    options = ["--rank-timeout", "20"]
    code, output, said = _launch(
        launched, tmp_path, engine, *call, options=options
    )
    assert code == 0, said
    assert len(said) == 1 and said[0].endswith("it starts anew: 1 of 1.")
    _check_losses(output)
    assert _processes(tmp_path) == [1, 1, 1, 2]
    _check_ended(tmp_path)


@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("seed", range(10))
def test_random_kills_of_a_server(launched, engine, seed, tmp_path):
    # Within an epoch it comes back; elsewhere all start anew.
    victim = [_FIRST, _SECOND][seed % 2]
    call = returns.at_any_time, victim, random.Random(seed).uniform(0, 0.8)
    code, output, said = _launch(launched, tmp_path, engine, *call)
    assert code == 0, said
    _check_losses(output)
    if sum(_processes(tmp_path)) == 5:
        assert len(said) == 1
    else:
        assert _processes(tmp_path) == [2, 2, 2, 2]
        assert "restart 1 of 1" in said[-1]
    _check_ended(tmp_path)
