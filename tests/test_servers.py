"""Dedicated servers: ranks that own the rows of tables and compute nothing."""

import functools
import json
import pathlib

import keras
import numpy as np
import pytest

from keras_sparsity import launch
from keras_sparsity.machines import ports
from tests import (
    checkpoint_functions,
    forked,
    matrix,
    oracles,
    without_launcher,
)
from tests import server_functions as functions
from tests.conftest import covering, engines
from tests.matrix import Cell

# Workers and servers of each engine; the others are left to `make test-all`.
_ALL = [(w, s) for w in (2, 3) for s in (1, 2)]
_USUAL = {"native": (3, 2), "horovod": (2, 1)}


CELLS = [
    Cell(
        optimizer="Adam",
        partitions=(3, 2),
        regularizer="l2",
        left_over=1,
        epochs=2,
        steps=6,
    ),
    Cell(
        optimizer="SGD",
        arguments={"momentum": 0.9, "global_clipnorm": 0.05},
        loop="own loop",
        steps=6,
    ),
    Cell(optimizer="Adam", keeps_rows=True, loop="train_on_batch", steps=6),
]


@pytest.mark.parametrize(
    ("engine", "num_workers", "num_servers", "cell"),
    covering(
        [
            (engine, *split, cell)
            for engine in _USUAL
            for split in _ALL
            for cell in CELLS
        ],
        [
            ("native", *_USUAL["native"], CELLS[0]),
            ("horovod", *_USUAL["horovod"], CELLS[1]),
            ("horovod", *_USUAL["horovod"], CELLS[2]),
        ],
    ),
)
def test_equals_one_process(cluster, engine, num_workers, num_servers, cell):
    """Weights, slots and losses; a rank that owns nothing has them, too."""
    outcomes = cluster(engine, num_workers, num_servers=num_servers).run(
        matrix.train, cell.to_json()
    )
    assert len(outcomes) == num_workers + num_servers
    for outcome in outcomes:
        found = matrix.differences(cell, outcome, num_workers)
        for name, difference in found.items():
            assert difference <= matrix.TOLERANCE[cell.policy], name


@functools.cache
def _reference():
    model = functions.build(keras.layers.Embedding, activity_regularizer="l2")
    oracles.dense_reference(
        model, keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"]
    )
    return functions.use(model, functions.inputs())


@pytest.mark.filterwarnings("ignore:.*shuffle=True.*:UserWarning")
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    ("engine", "num_workers", "num_servers"),
    covering(
        [(engine, *split) for engine in _USUAL for split in _ALL],
        [("horovod", *_USUAL["horovod"])],
    ),
)
def test_every_input_ends_with_the_workers(
    cluster, engine, num_workers, num_servers
):
    """Of unknown length, without end, sharded, arrays; and servers read none.

    Only they own rows and slots.
    """
    results = cluster(engine, num_workers, num_servers=num_servers).run(
        functions.train
    )
    expected = _reference()
    for found, _, _ in results:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(
                found[name], value, rtol=1e-4, atol=1e-5, err_msg=name
            )
    stored = [num_rows for _, num_rows, _ in results]
    assert stored[:num_workers] == [0] * num_workers
    assert sum(stored) == functions.ROWS and min(stored[num_workers:]) > 0
    for _, num_rows, of_slots in results:
        assert of_slots.keys() == {"_momentums", "_velocities"}
        assert set(of_slots.values()) == {num_rows}


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_a_loop_of_ones_own(cluster, engine):
    """Losses, sums, gathered outputs and metrics are those of the workers."""
    split = _USUAL[engine]
    results = cluster(engine, split[0], num_servers=split[1]).run(
        functions.loop
    )
    model = functions.build(keras.layers.Embedding)
    oracles.dense_reference(
        model, keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"]
    )
    x, y = functions.arrays()
    history = model.fit(
        x, y, batch_size=functions.BATCH, shuffle=False, verbose=0
    )
    weights = np.concatenate([w.ravel() for w in model.get_weights()])
    for found in results:
        np.testing.assert_allclose(found["weights"], weights, atol=1e-5)
        assert found["counts"].tolist() == [8.0] * 5 + [2.0]
        assert found["outputs"].shape == (functions.COUNT, 1)
        mae = history.history["mae"][0]
        np.testing.assert_allclose(found["mean"], mae, rtol=1e-5)
        mean = np.average(found["losses"], weights=found["counts"])
        loss = history.history["loss"][0]
        np.testing.assert_allclose(mean, loss, rtol=1e-5)


@functools.cache
def _undisturbed():
    """The first weights, and `train`'s result."""
    keras.utils.set_random_seed(5)
    first = checkpoint_functions.build(dropout=0.0).get_weights()
    return first, checkpoint_functions.train(dropout=0.0)


# Of workers and servers. By fewer workers than servers, and by two colocated
# processes; of workers and servers that were one before; with more servers.
_SPLITS = [
    ((3, 2), (1, 2), (2, 0)),
    ((2, 0), (2, 1), (2, 2)),
    ((2, 1), (2, 2), (3, 1)),
]


@pytest.mark.parametrize(
    ("engine", "splits"),
    covering(
        [(engine, splits) for engine in _USUAL for splits in _SPLITS],
        [("native", _SPLITS[0])],
    ),
)
def test_saved_and_resumed_with_another_split(
    cluster, engine, splits, tmp_path
):
    """After 11 steps, and after 11 more; slots, too."""
    first, undisturbed = _undisturbed()
    for split, interrupt_after in zip(splits, (11, 11, None), strict=True):
        num_workers, num_servers = split
        ranks = cluster(engine, num_workers, num_servers=num_servers)
        *_, resumed = ranks.run(functions.train_from, tmp_path, interrupt_after)
    slots = [np.zeros_like(slot) for slot in undisturbed[1]]
    for got, expected, start in zip(
        resumed[:2], undisturbed[:2], (first, slots), strict=True
    ):
        for a, b, begun in zip(got, expected, start, strict=True):
            moved = np.abs(b - begun).max()
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * moved)
    assert resumed[2] == undisturbed[2]
    for name, values in undisturbed[3].items():
        np.testing.assert_allclose(resumed[3][name], values, rtol=1e-4)


def test_a_table_larger_than_a_worker_can_hold(cluster):
    """1 GiB, where a worker has half of that left."""
    num_rows, dim = 2**20, 2**8
    results = cluster("native", 3, num_servers=2).run(
        functions.train_large, num_rows, dim, 2**29
    )
    stored = [num_stored for num_stored, _, _ in results]
    assert stored == [0, 0, 0, num_rows // 2, num_rows // 2]
    assert [can_hold for *_, can_hold in results[:3]] == [False] * 3
    for _, rows, _ in results:
        # 2 / (2 * dim) for each of the two places of an example.
        np.testing.assert_allclose(rows, np.full((2, dim), 1 / dim), rtol=1e-6)


def test_a_model_without_tables_says_so_once(cluster):
    results = cluster("native", 3, num_servers=2).run(
        functions.fit_without_tables
    )
    (said,), losses = results[0]
    assert "2 dedicated servers have nothing to do" in said
    model = functions.build(keras.layers.Embedding)
    oracles.dense_reference(model, keras.optimizers.SGD(0.01), loss="mse")
    x, y = functions.arrays()
    for _ in range(2):
        history = model.fit(
            x, y, batch_size=functions.BATCH, shuffle=False, verbose=0
        )
    np.testing.assert_allclose(losses, history.history["loss"], rtol=1e-5)
    for others, _ in results[1:]:
        assert others == []


def test_models_in_stages_take_no_servers(cluster):
    for told in cluster("native", 3, num_servers=2).run(
        functions.refuse_pipelines
    ):
        for name, message in zip(
            ("PipelineStrategy", "LayerPlacementStrategy"), told, strict=True
        ):
            assert f"{name} has each weight on processes that" in message
            assert "2 servers beside 3 workers" in message


# Launching.


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(functions.SCRIPT)
    return path


def test_an_unchanged_script_serves(script, tmp_path, capfd):
    """By the command line, which names the ranks' number for both kinds."""
    arguments = ["-n", "1", "--servers", "1", "--log-dir", str(tmp_path)]
    with forked.ranks():
        assert launch.main(["run", *arguments, str(script)]) == 0
    assert "RANK 0 1 worker 0 0\n" in capfd.readouterr().out
    log = (tmp_path / "rank-1.log").read_text()
    assert "RANK 1 1 ps 0 9\n" in log


def test_the_job_ps_of_tf_config(script):
    """As Kubeflow's TFJob starts pods, and ends them by SIGTERM."""
    with script.open("a") as file:
        file.write(
            "status = open('/proc/self/status').read()\n"
            "caught = int(status.split('SigCgt:')[1].split()[0], 16)\n"
            "print('CATCHES', bool(caught >> 14 & 1), flush=True)\n"
        )
    worker, server = (f"127.0.0.1:{port}" for port in ports.free(2))
    root = str(pathlib.Path(__file__).parents[1])
    variables = [
        {
            "TF_CONFIG": json.dumps(
                {
                    "cluster": {"ps": [server], "worker": [worker]},
                    "task": {"type": kind, "index": 0},
                }
            ),
            "PYTHONPATH": root,
        }
        for kind in ("worker", "ps")
    ]
    said = without_launcher.outputs([str(script)], variables)
    assert "RANK 0 1 worker 0 0\n" in said[0]
    assert "RANK 1 1 ps 0 9\n" in said[1]
    assert all("CATCHES False\n" in each for each in said)
