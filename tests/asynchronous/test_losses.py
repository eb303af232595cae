"""The loss of a worker: the others end the epoch, each example counted."""

import ast
import os
import random
import re

import numpy as np
import pytest

import keras_sparsity as ks
from keras_sparsity import launch
from keras_sparsity.checkpoint import storage
from tests import asynchronous_losses as losses
from tests import forked
from tests.conftest import covering, engines


def _run(function, num_processes, engine, *args, num_servers=1):
    with forked.ranks():
        return launch.run(
            *(function, num_processes, engine, args),
            num_servers=num_servers,
            timeout=240,
        )


def _check(results, victims, num_epochs=2, num_batches=losses.NUM_BATCHES):
    """Each batch was applied once in each epoch, and counted once."""
    left = [rank for rank in range(len(results)) if rank not in victims]
    for rank, result in enumerate(results):
        if rank in victims:
            assert result is None
            continue
        applied, history, _, ranks = result
        np.testing.assert_array_equal(applied, num_epochs)
        mean = (num_batches - 1) / 2
        assert history["loss"] == [mean] * num_epochs
        assert history == results[left[0]][1]
        assert ranks == left


def test_an_epoch_without_a_batch_keeps_the_order(cluster, tmp_path):
    # The dataset is shuffled anew in each epoch, and alike on all ranks.
    results = cluster("native", 2).run(
        losses.without_a_batch, str(tmp_path / "ended")
    )
    assert len(results[1][2]) < 2 * losses.NUM_BATCHES
    _check(results, [], 3)


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_killed_workers_batches_go_to_others(engine):
    # Rank 0, too; variables are on both servers.
    results = _run(
        *(losses.at_step, 3, engine, [0, 2], "SIGKILL", 5), num_servers=2
    )
    _check(results, [0, 2])


@pytest.mark.parametrize("engine", engines(usually="native"))
@pytest.mark.parametrize("when", ["unsent", "partly", "applied", "next"])
def test_a_batch_whose_push_is_under_way_counts_once(engine, when):
    results = _run(losses.while_pushing, 2, engine, 1, when, num_servers=2)
    _check(results, [1])


def test_a_push_that_is_left_out_has_not_ended():
    results = _run(losses.woken, 2, "native", 1, num_servers=2)
    _check(results, [1])


@pytest.mark.parametrize("engine", engines(usually="native"))
@pytest.mark.parametrize(
    "call, victims",
    [
        (("at_step", [1], "SIGKILL", 5), [1]),
        (("at_step", [0, 1], "SIGKILL", 5, False), [0, 1]),
        (("while_pushing", 1, "unsent"), [1]),
        (("while_pushing", 1, "partly"), [1]),
        (("while_pushing", 1, "applied"), [1]),
    ],
    ids=["killed", "killed, unknown length", "unsent", "partly", "applied"],
)
def test_batches_that_were_taken_early_count_once(engine, call, victims):
    call = losses.asking_early, 3, engine, *call
    _check(_run(*call, num_servers=2), victims)


@pytest.mark.parametrize("num_servers", [0, 1])
@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_workers_that_stop_leave_their_batches_to_others(ranks, num_servers):
    call = losses.asking_early, 3, "native", "stopping", ranks, 4
    results = _run(*call, num_servers=num_servers)
    _check(results, [], num_epochs=1)


def _check_error(folder):
    message, num_threads = (folder / "error").read_text().rsplit("\n", 1)
    assert "no luck" in message and num_threads == "0"


@pytest.mark.parametrize("is_last", [False, True])
def test_an_error_of_a_push_is_raised_on_its_rank(is_last, tmp_path):
    results = _run(losses.failing_push, 2, "native", str(tmp_path), is_last)
    _check_error(tmp_path)
    _check(results, [1], num_batches=2 if is_last else losses.NUM_BATCHES)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_without_dedicated_servers_it_ends_all(engine, tmp_path):
    with pytest.raises(Exception, match="no luck"):
        _run(
            *(losses.failing_push, 2, engine, str(tmp_path), False),
            num_servers=0,
        )
    _check_error(tmp_path)


@pytest.mark.parametrize("kind, victim", [("exit", 1), ("SIGTERM", 0)])
def test_a_worker_that_leaves_is_not_waited_for(kind, victim, tmp_path):
    results = _run(
        *(losses.behind_step, 2, "native", [victim], kind, 5, str(tmp_path))
    )
    _check(results, [victim])


@pytest.mark.parametrize(
    ("engine", "victim", "where"),
    covering(
        [
            (engine, *lost)
            for engine in ("native", "horovod")
            # Rank 0 writes the index and gives the checkpoint its name.
            for lost in ((1, "seal"), (0, "begin"), (0, "commit"))
        ],
        [("native", 1, "seal"), ("native", 0, "commit")],
    ),
)
def test_a_rank_is_lost_while_a_checkpoint_is_written(
    engine, victim, where, tmp_path
):
    results = _run(losses.while_saving, 2, engine, str(tmp_path), victim, where)
    _check(results, [victim])
    _, index = storage.latest(tmp_path, ks.collectives.current(), True)
    assert index["position"]["epoch"] == 2
    assert index["num_processes"] == 2


@pytest.mark.parametrize(
    ("engine", "victim"),
    covering(
        [(engine, lost) for engine in ("native", "horovod") for lost in (0, 1)],
        [("native", 0)],
    ),
)
def test_after_a_loss_a_checkpoint_is_read(engine, victim, tmp_path):
    results = _run(losses.restored, 3, engine, str(tmp_path), victim)
    _check(results, [victim])


def test_a_stopped_worker_is_left_behind():
    results = _run(losses.at_step, 2, "native", [1], "SIGSTOP", 3, False)
    _check(results, [1])


# Of those that join again, too.
@pytest.mark.all_cells
def test_the_launcher_says_it_in_one_line(launched, tmp_path):
    call = losses.at_step, [1], "SIGKILL", 5
    code, output, said = launched(tmp_path, 1, [], *call)
    assert code == 0, said
    assert "applied {2.0}" in output
    assert len(said) == 1
    assert said[0].startswith("keras-sparsity: rank 1 was killed by SIGKILL")
    path = tmp_path / "rank-1.log"
    assert said[0].endswith(f"(its output: {path}); others go on.")
    assert sorted(os.listdir(tmp_path)) == ["rank-1.log", "rank-2.log"]


def _check_resumed(
    launched, folder, engine, num_servers, victim, seconds, lost, rule
):
    options = ["--max-restarts", "1", "--engine", engine]
    code, output, said = launched(
        *(folder / "logs", num_servers, options, losses.resumed),
        *(str(folder / "checkpoints"), victim, seconds, lost, rule),
    )
    assert code == 0, said
    assert f"rank {victim} of" in said[-1] and "restart 1 of 1" in said[-1]
    assert "Resuming from" in output
    assert "applied {4.0}" in output
    mean = (losses.NUM_BATCHES - 1) / 2
    assert f"losses {[mean] * 4}" in output


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_after_a_servers_death_training_resumes(launched, engine, tmp_path):
    # A worker that was lost before takes part again.
    _check_resumed(launched, tmp_path, engine, 1, 2, 0.1, lost=0, rule="adam")


# Of workers and servers; without servers, all processes have a part of each.
_SPLITS = [
    ((2, 0), (2, 2)),
    ((2, 1), (2, 2), (3, 0)),
    ((3, 2), (2, 1), (1, 2)),
]


@pytest.mark.parametrize(
    ("engine", "splits", "rule"),
    covering(
        [
            (engine, splits, rule)
            for engine in ("native", "horovod")
            for splits in _SPLITS
            for rule in losses.RULES
        ],
        [("native", _SPLITS[0], "adagrad")],
    ),
)
def test_resumed_with_another_split(cluster, engine, splits, rule, tmp_path):
    # Two epochs with each; weights and slots are those of all epochs so far.
    for ended, (num_workers, num_servers) in enumerate(splits, 1):
        ranks = cluster(engine, num_workers, num_servers=num_servers)
        results = ranks.run(losses.goes_on, str(tmp_path), 2 * ended, rule)
        _check(results, [], 2 * ended)


def _check_rejoined(launched, folder, engine, victim, kind):
    options = ["--max-restarts", "1", "--engine", engine]
    options += ["--rank-timeout", "8"] * (kind == "SIGSTOP")
    code, output, said = launched(
        *(folder / "logs", 1, options, losses.rejoined),
        *(str(folder), victim, kind),
    )
    assert code == 0, said
    assert len(said) == 1 and said[0].endswith("it starts anew: 1 of 1.")
    (losses_,) = re.findall("losses (.*)", output)
    found = ast.literal_eval(losses_)
    mean = (losses.NUM_BATCHES - 1) / 2
    # Each batch was applied and counted once in each epoch, also with it.
    assert found == [mean] * len(found) and len(found) > 1
    assert f"applied {{{float(len(found))}}}" in output
    assert len((folder / "joined").read_text().split()) > 0
    # With 2 workers and a bound of 3 steps, and its own push under way.
    assert int((folder / "staleness").read_text()) <= 8
    # On all three ranks.
    assert (folder / "ranks").read_text() == "[0, 1, 2]\n" * 3
    if victim == 0:
        lines = (folder / "0.csv").read_text().splitlines()
        assert lines[0] == "of earlier epochs" and len(lines) > 1


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_lost_worker_joins_again(launched, engine, tmp_path):
    # Rank 0, which has the checkpoint and shows the history.
    _check_rejoined(launched, tmp_path, engine, 0, "SIGKILL")


@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP", "raise"])
@pytest.mark.parametrize("victim", [0, 1])
def test_all_lost_workers_join_again(launched, engine, kind, victim, tmp_path):
    _check_rejoined(launched, tmp_path, engine, victim, kind)


def _check_two(launched, folder, function, *args):
    """The losses of the second `fit`, of two."""
    options = ["--max-restarts", "1"]
    code, output, said = launched(
        *(folder / "logs", 1, options, function), *(str(folder), *args)
    )
    assert code == 0, said
    assert len(said) == 1 and said[0].endswith("it starts anew: 1 of 1.")
    (losses_,) = re.findall("losses (.*)", output)
    found = ast.literal_eval(losses_)
    assert found == [(losses.NUM_BATCHES - 1) / 2] * len(found)
    # Each batch was applied once in each epoch of both.
    assert f"applied {{{float(2 + len(found))}}}" in output
    return found


@pytest.mark.parametrize("victim, number", [(0, 0), (1, 1)])
def test_a_lost_worker_joins_a_later_fit(launched, victim, number, tmp_path):
    _check_two(launched, tmp_path, losses.rejoined_later, victim, number)
    assert len((tmp_path / "joined").read_text().split()) > 0
    assert (tmp_path / "ranks").read_text() == "[0, 1, 2]\n" * 3


def test_without_a_checkpoint_it_joins_no_later_fit(launched, tmp_path):
    found = _check_two(launched, tmp_path, losses.left_out_later, 1)
    assert len(found) == 2 and (tmp_path / "out").exists()


@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("seed", range(10))
def test_random_kills_of_the_first_server(launched, engine, seed, tmp_path):
    chance, victim = random.Random(seed), 2
    lost = chance.choice([0, 1, None])
    seconds = chance.uniform(0, 0.4)
    lost, rule = -1 if lost is None else lost, chance.choice([*losses.RULES])
    _check_resumed(launched, tmp_path, engine, 2, victim, seconds, lost, rule)


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
