"""`ks.plan` compares strategies, and the one that it makes trains."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity import planner
from keras_sparsity.board import comparison
from keras_sparsity.stages import strategy_costs
from tests import planner_functions
from tests.conftest import covering, engines


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_the_planned_strategy_trains_as_one_process(cluster, engine):
    alone = planner_functions.new_model()
    alone.fit(planner_functions.data(), epochs=2, shuffle=False, verbose=0)
    run = cluster(engine, 2).run
    for rate in (None, 0.01):
        found = run(planner_functions.planned_and_trained, rate)
        assert found[0][:3] == found[1][:3]
        plan, name, narrow, weights = found[0]
        best = next(cost for cost in plan.costs if cost.is_exact)
        assert (best.way == "data parallelism") == (name == "HybridStrategy")
        assert plan.cluster.size == 2
        assert plan.cluster.processes_per_processor == 2
        assert 0 < plan.cluster.message_seconds < 0.1
        assert 0 < (plan.cluster.message_seconds_per_byte or 1e-9) < 1e-6
        if rate:
            assert plan.cluster.megabits_per_second == rate
            # 2 numbers of an example in place of all gradients.
            assert name != "HybridStrategy"
            assert best.stages == (narrow,)
            assert best.bound == "link"
            assert best.busiest_bytes == 12 * 2 * 4
        else:
            assert plan.cluster.megabits_per_second > 0
            # None where processors take all of a small sum's time.
            assert (plan.cluster.latency_seconds or 1e-9) < 0.1
        for value, expected in zip(weights, alone.get_weights(), strict=True):
            np.testing.assert_allclose(value, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("engine", "model", "heads", "sent"),
    covering(
        [
            ("native", "recommender", ["rows", "flat"], 2 * 4),
            ("native", "language model", ["narrow"], 2 * 2),
            ("horovod", "recommender", ["rows", "flat"], 2 * 4),
            ("horovod", "language model", ["narrow"], 2 * 2),
        ],
        [("native", "recommender", ["rows", "flat"], 2 * 4)],
    ),
)
def test_layer_placement_with_tables(cluster, engine, model, heads, sent):
    make, make_batches = planner_functions.MODELS[model]
    alone, batches = make(), make_batches()
    alone.fit(batches, epochs=2, shuffle=False, verbose=0)
    # Where a softmax is a `Dense` layer, whose kernel is transposed.
    expected = ks.export(alone).get_weights()
    for plan, name, _, weights in cluster(engine, 2).run(
        planner_functions.planned_and_trained, 0.1, model
    ):
        # With one tail worker; and no pipelines.
        assert [cost.way for cost in plan.costs] == [
            "layer placement",
            "data parallelism",
        ]
        assert name == "LayerPlacementStrategy"
        assert plan.costs[0].stages[0] in heads
        # One worker has all rows: numbers of an example travel to the tail.
        assert plan.costs[0].busiest_bytes == 12 * sent * 4
        for value, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(value, other, atol=1e-5)


def test_sharded_tables_are_shared_by_workers():
    width = 16
    cluster = ks.planning.Cluster(4, megabits_per_second=100.0)
    model = planner_functions.new_recommender(width)
    plan = ks.plan(model, planner_functions.recommender_data(), cluster)
    ways = {(cost.way, cost.num_tails): cost for cost in plan.strategies}
    assert set(ways) == {
        ("data parallelism", 0),
        ("layer placement", 1),
        ("layer placement", 2),
    }
    table, first = 4 * 4 * planner_functions.NUM_ROWS, 4 * (8 * 2 + 2)
    tail = 4 * (10 * width + width + width + 1)
    # Momentum: weights, gradients, one slot; and outputs of 3 examples.
    outputs = 4 * (8 + 2 + 8 + 10 + width + 1)
    whole = ways["data parallelism", 0]
    assert whole.memory_bytes == pytest.approx(
        [3 * (first + tail + table / 4) + 3 * outputs]
    )
    for num_tails in (1, 2):
        placed = ways["layer placement", num_tails]
        shared = table / (4 - num_tails)
        most = 3 * (shared + first + tail) + 12 * outputs
        assert 3 * shared <= placed.memory_bytes[0] <= most


def test_tied_weights_are_not_compared():
    words = keras.Input((3,), dtype="int32")
    rows = ks.layers.ShardedEmbedding(100, 2)
    for table in (rows, None):
        softmax = ks.layers.SampledSoftmax(100, 8, table=table)
        model = keras.Model(words, softmax(rows(words)))
        assert comparison.can_be_cut(model) == (table is None)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_models_that_are_trained_already_can_be_planned(cluster, engine):
    found = cluster(engine, 2).run(planner_functions.planned_under_hybrid)
    assert found[0] == found[1]
    plan, is_changed, loss = found[0]
    _check_number(plan.costs, 1 + 1, num_pipelines=1)
    assert not is_changed
    assert np.isfinite(loss)


def _check_number(costs, num_others, num_pipelines):
    """Five schedules of each pipeline.

    The three without a flush have messages ahead, too, where these make a step
    shorter, by the measured times.
    """
    num_ahead = sum(cost.messages_ahead for cost in costs)
    assert len(costs) - num_ahead == num_others + 5 * num_pipelines
    assert num_ahead in range(0, 3 * num_pipelines + 1, 3)


def test_models_of_a_fixed_batch_size_are_not_compared():
    inputs = keras.Input(batch_shape=(12, 8))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    assert not comparison.can_be_cut(model)
    assert comparison.can_be_cut(planner_functions.new_model())


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_layer_that_refuses_to_be_measured_leaves_the_plan(cluster, engine):
    found = cluster(engine, 2).run(planner_functions.planned_and_not_compared)
    assert found[0] == found[1]
    costs, failures, error, loss = found[0]
    assert costs == ()
    assert list(failures) == [
        "data parallelism",
        "layer placement",
        "pipeline",
    ]
    for reason in failures.values():
        assert reason.startswith("On rank 0: ") and "too few" in reason
    assert "could not be compared" in error and "too few" in error
    assert np.isfinite(loss)


def test_the_printed_plan_says_why_a_way_was_not_compared(capsys):
    data = planner_functions.picky_data()
    for rate in (100.0, None):
        cluster = ks.planning.Cluster(4, megabits_per_second=rate)
        ks.plan(planner_functions.new_picky_model(), data, cluster)
        printed = capsys.readouterr().out
        assert "alpha of the model" in printed
        is_compared = rate is not None
        assert ("could not be compared: On rank 0" in printed) == is_compared
    with mock.patch.object(
        strategy_costs, "PipelineCosts", side_effect=KeyError("no such cut")
    ):
        plan = described(megabits_per_second=100.0)
    assert plan.comparison.failures == {"pipeline": "KeyError: 'no such cut'"}
    assert {cost.way for cost in plan.strategies} == {
        "data parallelism",
        "layer placement",
    }
    row = plan.comparison.markdown().splitlines()[-3]
    assert row.startswith("| pipeline |")
    assert row.endswith("| could not be compared: KeyError: 'no such cut' |")


def test_unknown_sizes_are_those_of_the_batch(capsys):
    cluster = ks.planning.Cluster(2, megabits_per_second=100.0)
    words, more = (keras.Input((None,), dtype="int32") for _ in range(2))
    rows = keras.layers.Embedding(50, 6, name="rows")
    # Of a length that 3 divides, unlike 16.
    groups = keras.layers.Reshape((-1, 18), name="groups")(rows(words))
    x = keras.layers.Dense(2, name="narrow")(groups)
    x = keras.layers.GlobalAveragePooling1D(name="mean")(x)
    other = keras.layers.GlobalAveragePooling1D(name="other")(rows(more))
    x = keras.layers.Concatenate(name="all")([x, other])
    model = keras.Model([words, more], keras.layers.Dense(1, name="out")(x))
    model.compile("sgd", "mse")
    ids = np.zeros((4, 30), "int32"), np.zeros((4, 7), "int32")
    data = tf.data.Dataset.from_tensors((ids, np.zeros((4, 1))))
    plan = ks.plan(model, data, cluster)
    assert not plan.comparison.failures
    assert " count as " not in capsys.readouterr().out
    found = comparison.Cutter(model, ids)
    sizes = {
        call.name: found.example_shape(call.outputs[0]) for call in found.calls
    }
    assert sizes["groups"] == [10, 18] and sizes["narrow"] == [10, 2]
    whole = next(c for c in plan.strategies if c.way == "data parallelism")
    # Two examples' outputs of the calls, and weights, gradients, no slots.
    outputs = 30 * 6 + 7 * 6 + 10 * 18 + 10 * 2 + 2 + 6 + 8 + 1
    weights = 50 * 6 + (18 * 2 + 2) + (8 + 1)
    assert whole.memory_bytes == (2 * 4 * weights + 2 * 4 * outputs,)


def test_a_plan_tells_of_unknown_sizes_and_of_pairs(capsys):
    cluster = ks.planning.Cluster(2, megabits_per_second=100.0)

    def even(x):
        return tf.boolean_mask(x, tf.range(tf.shape(x)[1]) % 2 == 0, axis=1)

    inputs = keras.Input((9, 2))
    x = keras.layers.Lambda(even, output_shape=(None, 2), name="even")(inputs)
    x = keras.layers.GlobalAveragePooling1D(name="mean")(x)
    x = keras.layers.Dense(1, name="out")(x)
    scores = keras.layers.Lambda(
        lambda x: keras.ops.matmul(x, keras.ops.transpose(x)), name="scores"
    )
    model = keras.Model(inputs, scores(x))
    model.compile("sgd", "mse")
    batch = np.zeros((4, 9, 2), "float32"), np.zeros((4, 1))
    plan = ks.plan(model, tf.data.Dataset.from_tensors(batch), cluster)
    assert plan.comparison.unknown_size == 16
    printed = " ".join(capsys.readouterr().out.split())
    assert "lengths of sequences, count as 16" in printed
    assert "'scores' computes with pairs of a mini-batch's examples" in printed
    assert "if it gathers" in printed
    of_pipelines = [c for c in plan.strategies if c.schedule]
    assert of_pipelines
    assert {cost.num_micro_batches for cost in of_pipelines} == {1}


def described(**options):
    cluster = ks.planning.Cluster(4, **options)
    model = planner_functions.new_model(width=16)
    return ks.plan(model, planner_functions.data(), cluster)


def test_plan_for_a_described_cluster(capsys):
    plan = described(megabits_per_second=100.0, latency_seconds=1e-3)
    printed = capsys.readouterr().out
    assert printed.index("alpha of the model") < printed.index("missed updates")
    _check_number(plan.strategies, 1 + 2, num_pipelines=3)
    seconds = [cost.step_seconds for cost in plan.strategies]
    assert seconds == sorted(seconds)
    ways = {cost.way: cost for cost in plan.strategies}
    parameters = sum(
        int(np.prod(v.shape))
        for v in planner_functions.new_model(width=16).trainable_variables
    )
    whole = ways["data parallelism"]
    # In a ring of 4, in one direction.
    assert whole.busiest_bytes == pytest.approx(4 * parameters * 2 * 3 / 4)
    # Momentum: weights, gradients, one slot, and outputs of 3 examples.
    outputs = 4 * (8 + 2 + 16 + 16 + 1)
    assert whole.memory_bytes == (3 * 4 * parameters + 3 * outputs,)
    assert whole.step_seconds > 6e-3
    with pytest.raises(ValueError, match="for 4 processes.*are 1"):
        plan.strategy()


def test_one_process_has_one_way():
    """So the script of several processes runs in one."""
    model = planner_functions.new_model()
    plan = ks.plan(model, planner_functions.data())
    assert plan.strategies == ()
    assert isinstance(plan.strategy(), ks.HybridStrategy)


def test_without_the_rate_of_links_nothing_is_compared():
    plan = described()
    assert plan.strategies == ()
    with pytest.raises(ValueError, match="not compared.*megabits_per_second"):
        plan.strategy()


def test_strategies_of_costs():
    plan = described(megabits_per_second=100.0)
    ways = set()
    for cost in plan.strategies:
        num_stages, ranks = len(cost.stages) + 1, cost.ranks_of_stages
        ways.add((cost.way, cost.schedule, num_stages))
        # One process is too few for most of them.
        with (
            mock.patch.object(
                planner, "PipelineStrategy", autospec=True
            ) as pipeline,
            mock.patch.object(
                planner, "LayerPlacementStrategy", autospec=True
            ) as placement,
        ):
            strategy = planner.strategy_of(cost)
        if cost.way != "data parallelism":
            assert strategy.planned_cuts is cost.cuts
            names = [cost.cuts.names[place] for place in cost.cuts.places]
            assert names == list(cost.stages)
        if cost.way == "pipeline":
            if num_stages == 3:
                assert sorted(ranks) == [1, 1, 2]
            pipeline.assert_called_once_with(
                cost.schedule,
                stages=list(cost.stages),
                num_micro_batches=cost.num_micro_batches,
                replicas=list(ranks) if num_stages == 3 else 4 // num_stages,
                messages_ahead=cost.messages_ahead,
            )
        elif cost.way == "layer placement":
            placement.assert_called_once_with(
                list(cost.stages),
                num_tail_workers=cost.num_tails,
                tail_split=cost.tail_split,
            )
        else:
            assert isinstance(strategy, ks.HybridStrategy)
    assert {way for way, *_ in ways} == {
        "data parallelism",
        "layer placement",
        "pipeline",
    }
    assert {
        ("pipeline", schedule, num_stages)
        for schedule in ("gpipe", "1f1b", "vanilla", "stash", "spectrain")
        for num_stages in (2, 3, 4)
    } <= ways


def test_of_more_workers_than_examples_few_parts_are_looked_at():
    cluster = ks.planning.Cluster(1_000, megabits_per_second=100.0)
    inputs = keras.Input((2,), dtype="int32")
    x = keras.layers.Embedding(50, 4, name="rows")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(x))
    model.compile("sgd", "mse")
    ids = np.arange(24).reshape(12, 2)
    data = tf.data.Dataset.from_tensors((ids, np.zeros((12, 2, 1))))
    plan = ks.plan(model, data, cluster)
    # An example of 2 different rows.
    assert plan.variables[0].sparsity.alpha == pytest.approx(2 / 50)
    # Of two layers.
    assert {len(cost.stages) + 1 for cost in plan.strategies} == {1, 2}
