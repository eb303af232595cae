"""Training goes on as if nothing had happened, while its tables move."""

import dataclasses

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests import matrix
from tests import move_functions as functions
from tests.cluster import Cluster
from tests.conftest import engines
from tests.matrix import Cell

# By executions: the numbers of partitions of two tables, and their places.
COUNTS = {"2": [5, 1], "4": [1, 40], "6": [4, 3]}
PLACES = {
    "1": ["allgather", "allreduce"],
    "3": ["allreduce", ["ps", 4]],
    "5": [["ps", 3], "allreduce"],
    "7": ["allreduce", "allgather"],
}

# Eagerly, where each move would trace the step once more.
CELLS = {
    "adam, ema, loss scaling": Cell(
        optimizer="Adam",
        arguments={"use_ema": True, "ema_momentum": 0.7, "clipvalue": 0.01},
        loss_scale=True,
        overflows=True,
        run_eagerly=True,
    ),
    # `ReduceLROnPlateau` sets the learning rate.
    "lazy adam, plateau": Cell(
        optimizer="Adam",
        sparse_updates="lazy",
        run_eagerly=True,
        plateau=True,
        epochs=2,
        steps=5,
    ),
    "momentum, accumulation, decay": Cell(
        arguments={
            "learning_rate": 0.1,
            "momentum": 0.9,
            "weight_decay": 0.1,
            "gradient_accumulation_steps": 3,
        },
        not_decayed="by variable",
        run_eagerly=True,
        ordinary=True,
    ),
    # TensorFlow rewrites its rule, in a function.
    "adagrad, several steps": Cell(optimizer="Adagrad", steps_per_execution=3),
}
CELLS = {
    name: dataclasses.replace(cell, partitions=(3, 2), steps=min(cell.steps, 9))
    for name, cell in CELLS.items()
}
N2, N4, H2, H4 = (("native", 2), ("native", 4), ("horovod", 2), ("horovod", 4))
# Where `make test` moves tables in a cell; `make test-all` does it everywhere.
IN_MAKE_TEST = {
    "adam, ema, loss scaling": (H2,),
    "lazy adam, plateau": (),
    "momentum, accumulation, decay": (),
    "adagrad, several steps": (N2,),
}


def _places():
    skipped = {param.values[0]: param.marks for param in engines()}
    for place in (N2, N4, H2, H4):
        for name in CELLS:
            marks = list(skipped[place[0]])
            if place not in IN_MAKE_TEST[name]:
                marks.append(pytest.mark.all_cells)
            yield pytest.param(*place, name, marks=marks)


@pytest.mark.parametrize(("engine", "num_processes", "name"), list(_places()))
def test_training_does_not_see_moves(cluster, engine, num_processes, name):
    cell = CELLS[name]
    counts, places = COUNTS, PLACES
    if cell.steps_per_execution > 1:
        counts, places = {"1": [5, 1]}, {"1": PLACES["1"]}
    repartitioned = dataclasses.replace(cell, moves=counts)
    moved = dataclasses.replace(cell, moves=places)
    cells = [each.to_json() for each in (cell, repartitioned, moved)]
    results = cluster(engine, num_processes).run(
        functions.train_all, cells, timeout=200
    )
    for expected, outcome, _ in results:
        assert outcome.losses == expected.losses
        functions.assert_same(outcome.end.values(), expected.end.values())
    place = engine, num_processes, 1
    matrix.verify(moved, [outcomes[2] for outcomes in results], place)


@pytest.mark.parametrize(
    "function",
    [
        functions.relocate_in_blocks,
        functions.move_a_softmax,
        functions.other_models_follow,
        functions.ask_for_architectures,
        functions.ask_for_different_moves,
    ],
)
def test_on_all_ranks(cluster, function):
    cluster("native", 2).run(function)


@pytest.mark.parametrize("engine", engines("horovod"))
def test_rows_keep_their_bits_on_the_other_engine(cluster, engine):
    cluster(engine, 2).run(functions.relocate_in_blocks)


def test_a_model_whose_tables_have_moved(cluster, tmp_path):
    cluster("native", 2).run(functions.use_after_moves, str(tmp_path))


def test_no_rank_holds_a_table_for_it():
    # Of its own: what other tests leave in a process's memory counts, too.
    cluster = Cluster(2, "native")
    try:
        found = cluster.run(functions.peak_memory, 1_000_000, 32)
    finally:
        cluster.stop()
    for part, peaks in found:
        assert part > 60  # MiB
        # A new part beside the old one, and blocks.
        assert max(peaks) < part + 20, peaks


# In one process.


def test_one_process_has_nothing_to_move():
    layer = ks.layers.ShardedEmbedding(9, 2)
    model = keras.Sequential([keras.Input((2,)), layer])
    with ks.HybridStrategy(architecture="allgather").scope():
        model.compile("adam", "mse")
    x = np.zeros((4, 2))
    model.fit(x, np.zeros((4, 2, 2)), verbose=0)
    function = model.train_function
    ks.moves.repartition(model, {layer.table: 3})
    ks.moves.move(model, {layer.table: "allreduce"})
    ks.moves.move(model, {layer.table: ("ps", 5)})
    assert model.train_function is function
    assert not layer.table.is_sharded
    assert layer.table.requested_partitions == 5


@pytest.mark.parametrize(
    ("move", "target"),
    [(ks.moves.repartition, 10**9), (ks.moves.move, ("ps", 10**9))],
)
def test_more_partitions_than_variables_can_be(move, target):
    layer = ks.layers.ShardedEmbedding(9, 2)
    model = keras.Sequential([keras.Input((2,)), layer])
    with pytest.raises(ValueError, match="at most 1,000,000.*=1000000000"):
        move(model, {layer.table: target})
