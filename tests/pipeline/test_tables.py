"""Sharded tables in a head on all workers train as in one process."""

import functools

import numpy as np
import pytest

from tests.cluster import ClusterError
from tests.conftest import covering, engines
from tests.pipeline import table_functions as functions
from tests.pipeline.test_layer_placement import check, distance


@functools.cache
def _expected(rule, num_examples, regularizer=None):
    model = functions.compiled(rule, regularizer=regularizer)
    before = model.get_weights()
    found = functions.results(model, num_examples)
    return found, distance(found["weights"], before)


def _cells():
    """Of the most different ways in each run, of the others in all cells."""
    for engine in engines():
        (name,), marks = engine.values, list(engine.marks)
        for rule, regularizer, size, options, model_options in [
            ("adam", None, 3, {}, {}),
            ("adagrad", None, 3, {}, {}),
            ("sgd", None, 3, {}, {}),
            ("momentum", "l2", 3, {}, {}),
            # A head of tables alone, a worker without rows of some.
            (
                *("by weight", None, 3),
                *({"stages": ["all"]}, {"num_partitions": 1}),
            ),
            ("clipped", "l2", 4, {"tail_batches": "by_worker"}, {}),
            ("scaled", None, 5, {"num_tail_workers": 2}, {}),
            ("adam", "l2", 2, {}, {}),
            ("adagrad", None, 4, {}, {"is_inside": False}),
            ("adam", "l2", 4, {"head_gradients": "server"}, {}),
        ]:
            is_chosen = (name, rule, size) in [
                ("native", "momentum", 3),
                ("native", "by weight", 3),
                ("horovod", "adagrad", 3),
            ]
            yield pytest.param(
                *(name, rule, regularizer, size, options, model_options),
                marks=marks + [pytest.mark.all_cells] * (not is_chosen),
            )


@pytest.mark.parametrize(
    ("engine", "rule", "regularizer", "size", "options", "model_options"),
    list(_cells()),
)
def test_as_one_process(
    cluster, engine, rule, regularizer, size, options, model_options
):
    # The last batch has one example.
    ranks = cluster(engine, size, has_groups=True).run(
        *(functions.train, rule, 17, options),
        {"regularizer": regularizer, **model_options},
    )
    for rank in ranks:
        check(rank, *_expected(rule, 17, regularizer))
    num_tails = options.get("num_tail_workers", 1)
    workers, tails = ranks[: size - num_tails], ranks[size - num_tails :]
    # A worker has its rows alone, a tail worker none.
    assert not any(map(any, (rank["num_rows"] for rank in tails)))
    if len(workers) > 1:
        for of_table in zip(*(r["num_rows"] for r in workers), strict=True):
            assert sum(of_table) in (functions.NUM_ROWS, 31, 50, 40)
        assert all(rank["num_rows"][0] < 5000 for rank in workers[1:])
        # All tables' rows travel together.
        assert {len(rank["messages"]) for rank in workers} == {1}


@pytest.mark.parametrize(
    "rule", [pytest.param("adam", marks=pytest.mark.all_cells), "scaled"]
)
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_saved_loaded_exported(cluster, engine, rule, tmp_path):
    ranks = cluster(engine, 3, has_groups=True).run(
        functions.train, rule, 17, {}, {}, str(tmp_path)
    )
    expected, moved = _expected(rule, 17)
    for rank in ranks:
        check(rank, expected, moved)
        for name in ("loaded", "plain"):
            away = distance(rank[f"{name} gone on"], rank["gone on"])
            assert away <= 1e-5 * moved
        assert distance(rank["gone on"], rank["weights"]) > 0.1
        for value, other in zip(
            rank["loaded weights"], rank["weights"], strict=True
        ):
            np.testing.assert_array_equal(value, other)


@pytest.mark.parametrize(
    ("engine", "sizes"),
    # A table goes on beside a softmax in `test_softmax_in_tail.py`.
    covering(
        [
            *(("native", sizes) for sizes in [(3, 2), (4, 3), (2, 4)]),
            ("horovod", (3, 2)),
        ],
        [],
    ),
)
def test_goes_on_with_other_workers(cluster, engine, sizes, tmp_path):
    for epochs, size in enumerate(sizes, start=1):
        ranks = cluster(engine, size, has_groups=True).run(
            functions.checkpointed, str(tmp_path), epochs, 17
        )
    expected, moved = _expected("adam", 17)
    for weights in ranks:
        assert distance(weights, expected["weights"]) <= 1e-5 * moved


@pytest.mark.all_cells
def test_left_to_data_parallelism(cluster):
    for found, strategy in cluster("native", 3).run(functions.left):
        assert strategy == "HybridStrategy"
        check(found, *_expected("adagrad", 17))


def test_refused(cluster):
    for found in cluster("native", 3).run(functions.refused):
        assert "in the tail of the layers" in found["tail"]
        assert "Divide the model behind it" in found["tail"]
        assert "ShardedEmbedding" in found["pipeline"]
        assert "an optimizer that is built" in found["built"]
        for name in ("rule", "scaled rule"):
            assert "The optimizer Lamb cannot be applied" in found[name]
        assert "OwnApply has an `apply` of its own" in found["own apply"]
        assert "'users'" in found["regularizer"]
        assert "OrthogonalRegularizer" in found["regularizer"]
        assert "The layer 'own' spreads its rows" in found["own table"]
        assert "a ShardedTable" in found["own table"]


def test_plan(cluster):
    (plan, star), *others = cluster("native", 3).run(functions.planned, 12)
    assert all(other == [plan, star] for other in others)
    assert "rows of a worker" in plan.markdown()
    split = next(cost for cost in plan.costs if cost.place == plan.chosen)
    # Of 6 examples: numbers of rows of 2 bytes, and twice a row of float32.
    users, right = 6 * (2 + 8 * 6), 6 * (2 + 8 * 3)
    bag, left = 24 * (2 + 8 * 4), 24 * (2 + 8 * 3)
    items = 31 * (2 + 8 * 6)  # all, as their number is not known
    assert split.row_bytes == users + right + items + bag + left
    dense, sent = 4 * (22 * 8 + 8), 6 * 4 * 8
    # Half of the rows are the worker's own; a ring sums the dense gradients.
    of_worker = sent + split.row_bytes / 2 + dense
    assert split.busiest_bytes == max(2 * sent, of_worker)
    tables = 4 * (6 * 8209 + 6 * 31 + 4 * 50 + 3 * 40 + 3 * 8209)
    assert split.head_bytes == dense + tables
    assert split.star_bytes == 2 * (sent + dense)
    # Tables are in the head: no split is before the last of them.
    assert min(plan.names) >= 4
    of_star = next(cost for cost in star.costs if cost.place == star.chosen)
    # Twice as much at the tail worker; a worker has its rows besides.
    of_worker = sent + split.row_bytes / 2 + dense
    assert of_star.busiest_bytes == max(split.star_bytes, of_worker)


# The tables raise it, as in `tests/layers`, and an error ends all ranks.
@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
def test_an_id_outside_of_a_table_ends_all_ranks(cluster, engine):
    with pytest.raises(ClusterError, match=r"ids must lie in \[0, 8209\)"):
        cluster(engine, 3, has_groups=True).run(functions.fit_outside)
