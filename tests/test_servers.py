"""Dedicated servers: ranks that own the rows of tables and compute nothing."""

import functools

import keras
import numpy as np
import pytest

from tests import checkpoint_functions, matrix, oracles
from tests import server_functions as functions
from tests.conftest import engines
from tests.matrix import Cell

# Workers and servers of each engine; the others are left to `make test-all`.
_ALL = [(w, s) for w in (2, 3) for s in (1, 2)]
_USUAL = {"native": (3, 2), "horovod": (2, 1)}


def splits():
    """Parameters: an engine, the numbers of workers and of servers."""
    return [
        pytest.param(
            *(*engine.values, *split),
            marks=[
                *engine.marks,
                *[pytest.mark.all_cells] * (_USUAL[engine.values[0]] != split),
            ],
        )
        for engine in engines()
        for split in _ALL
    ]


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


@pytest.mark.parametrize(("engine", "num_workers", "num_servers"), splits())
@pytest.mark.parametrize("cell", CELLS, ids=Cell.to_json)
def test_equals_one_process(cluster, engine, num_workers, num_servers, cell):
    """Weights, slots and losses; a rank that owns nothing has them, too."""
    outcomes = cluster(engine, num_workers, num_servers=num_servers).run(
        matrix.train, cell.to_json()
    )
    assert len(outcomes) == num_workers + num_servers
    for outcome in outcomes:
        found = matrix.differences(cell, outcome, num_workers)
        for name, difference in found.items():
            assert difference <= matrix.tolerance(cell, name), name


@functools.cache
def _reference():
    model = functions.build(keras.layers.Embedding)
    oracles.dense_reference(
        model, keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"]
    )
    return functions.use(model, functions.inputs())


@pytest.mark.filterwarnings("ignore:.*shuffle=True.*:UserWarning")
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(("engine", "num_workers", "num_servers"), splits())
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


@pytest.mark.parametrize("engine", engines())
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


def test_saved_and_resumed_with_another_split(cluster, tmp_path):
    """By fewer workers than servers, and by two colocated processes."""
    undisturbed = checkpoint_functions.train(dropout=0.0)
    for places, interrupt_after in (((3, 2), 11), ((1, 2), 11), ((2, 0), None)):
        num_workers, num_servers = places
        ranks = cluster("native", num_workers, num_servers=num_servers)
        *_, resumed = ranks.run(functions.train_from, tmp_path, interrupt_after)
    for got, expected in zip(resumed[:2], undisturbed[:2], strict=True):
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert resumed[2] == undisturbed[2]
    for name, values in undisturbed[3].items():
        np.testing.assert_allclose(resumed[3][name], values, rtol=1e-4)
