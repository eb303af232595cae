"""Heads on all workers and a tail on one train as one process does."""

import dataclasses
import functools
import re

import keras
import numpy as np
import pytest

from keras_sparsity.launch import command_line
from keras_sparsity.pipeline.splits import Splits
from keras_sparsity.planning import Cluster, VariableSpec
from keras_sparsity.stages.costs import ModelFacts
from keras_sparsity.stages.cutting import Cutter
from keras_sparsity.stages.layer_placement import LayerSize
from keras_sparsity.stages.measurements import Measurable, Measured
from keras_sparsity.stages.profile import GradientSize, Profile
from keras_sparsity.stages.split_costs import split_costs
from tests.conftest import covering, engines
from tests.pipeline import placement_functions


def distance(values, others):
    return np.sqrt(
        sum(
            np.square(value.astype("float64") - other).sum()
            for value, other in zip(values, others, strict=True)
        )
    )


def check(rank, expected, moved):
    """Compares a rank's `results` with those of one process."""
    assert moved > 0.1
    assert distance(rank["weights"], expected["weights"]) <= 1e-5 * moved
    for key, values in expected["history"].items():
        np.testing.assert_allclose(rank["history"][key], values, rtol=1e-5)
    np.testing.assert_allclose(
        rank["evaluated"], expected["evaluated"], rtol=1e-5
    )
    np.testing.assert_allclose(
        rank["predicted"], expected["predicted"], rtol=1e-4, atol=1e-5
    )


_BY_WORKER = {"tail_batches": "by_worker"}
_AT_SERVERS = {"head_gradients": "server"}
_TWO_TAILS = {"num_tail_workers": 2}
# Divided batches of a tail: `test_softmax_in_tail.py`.
_USUAL = [
    ("horovod", "convolutional", 3, 22, _AT_SERVERS),
    # A worker has several tails; the last batch has one example.
    ("horovod", "ids", 3, 17, _TWO_TAILS),
]
_MORE = [
    # Of two workers.
    ("horovod", "ids", 3, 17, {}),
    ("native", "convolutional", 2, 22, {}),
    ("horovod", "single", 3, 22, {}),
    ("horovod", "ids", 5, 22, _TWO_TAILS | _BY_WORKER),
    ("native", "single", 5, 22, {}),
    ("native", "convolutional", 5, 22, {"num_tail_workers": 3}),
    ("native", "ids", 4, 17, _TWO_TAILS),
    ("native", "convolutional", 3, 22, {}),
    ("native", "convolutional", 3, 22, _TWO_TAILS),
    ("horovod", "convolutional", 5, 22, {}),
    ("native", "ids", 4, 22, _BY_WORKER),
    ("horovod", "convolutional", 5, 22, _TWO_TAILS),
    # Also of rows of an `Embedding`, and sums over the tails.
    ("native", "ids", 5, 17, _TWO_TAILS | _AT_SERVERS),
]


@pytest.mark.parametrize(
    ("engine", "name", "size", "num_examples", "options"),
    covering(
        [
            (engine, *case)
            for engine in ("native", "horovod")
            for _, *case in _USUAL + _MORE
        ],
        _USUAL,
    ),
)
def test_as_one_process(
    cluster, engine, name, size, num_examples, options, tmp_path
):
    ranks = cluster(engine, size, has_groups=True).run(
        placement_functions.train, name, num_examples, str(tmp_path), options
    )
    model = placement_functions.compiled(name)
    before = model.get_weights()
    expected = placement_functions.results(model, name, num_examples)
    moved = distance(expected["weights"], before)
    assert moved > 0.1
    for rank in ranks:
        check(rank, expected, moved)
        for value, other in zip(rank["gone_on"], rank["resumed"], strict=True):
            np.testing.assert_array_equal(value, other)
    total = sum(value.size for value in expected["weights"])
    (tail,) = {rank["num_held"] for rank in ranks if rank["is_tail"]}
    (head,) = {rank["num_held"] for rank in ranks if not rank["is_tail"]}
    assert head + tail == total
    if name in ("convolutional", "single"):
        # After the last pooling.
        assert ranks[0]["head"] == ("conv", "head", "relu", "pool")


@pytest.mark.parametrize(
    ("engine", "size", "num_examples", "rule", "tail_split"),
    covering(
        [
            ("native", 4, 22, "momentum", "columns"),
            ("native", 5, 17, "adam", None),
            ("native", 5, 22, "scaled", "columns"),
            ("native", 3, 17, "momentum", "columns"),
            ("horovod", 4, 22, "momentum", "columns"),
            ("horovod", 5, 17, "adam", None),
        ],
        # The last batch has one example.
        [("native", 3, 17, "momentum", "columns")],
    ),
)
def test_tails_that_divide_columns(
    cluster, engine, size, num_examples, rule, tail_split, tmp_path
):
    options = {"num_tail_workers": 2, "tail_split": tail_split}
    ranks = cluster(engine, size, has_groups=True).run(
        placement_functions.train_columns,
        *("wide", num_examples, str(tmp_path), options, rule),
    )
    model = placement_functions.compiled("wide", rule=rule)
    before = model.get_weights()
    expected = placement_functions.results(model, "wide", num_examples)
    slots = [variable.numpy() for variable in model.optimizer.variables]
    kernels = [model.get_layer(x).kernel.numpy() for x in ("wide", "second")]
    gone_on, frozen = placement_functions.go_on_frozen(
        model, "wide", num_examples
    )
    moved = distance(expected["weights"], before)
    assert moved > 0.1
    for rank in ranks:
        for found, values in [
            (rank["exported"], expected["weights"]),
            (rank["gone_on"], gone_on),
            (rank["compiled_again"], gone_on),
            (rank["frozen"], frozen),
        ]:
            assert distance(found, values) <= 1e-5 * moved
        check(rank, expected, moved)
        for value, other in zip(rank["slots"], slots, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-3, atol=1e-6)
        for value, other in zip(rank["gone_on"], rank["resumed"], strict=True):
            np.testing.assert_array_equal(value, other)
    for rank in ranks[-2:]:
        for value, kernel in zip(rank["kernels"], kernels, strict=True):
            np.testing.assert_allclose(value, kernel, rtol=1e-3, atol=1e-5)
        # Of kernels but for those that are divided.
        assert (17, 8) in rank["sums"]
        assert not {(12, 41), (41, 17)} & set(rank["sums"])


def test_what_cannot_divide_columns(cluster):
    for messages in cluster("native", 4, has_groups=True).run(
        placement_functions.refused_columns
    ):
        assert "clipnorm=1.0 needs the norms" in messages[0]
        assert "the rule of Lamb needs whole kernels" in messages[1]
        assert "no `Dense` layer to divide" in messages[2]


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_models_that_gain_nothing_are_left_to_data_parallelism(cluster, engine):
    ranks = cluster(engine, 2).run(
        placement_functions.left, {"rule": "published"}
    )
    model = placement_functions.compiled("ids")
    before = model.get_weights()
    expected = placement_functions.results(model, "ids", 22)
    moved = distance(expected["weights"], before)
    for found, _, strategy, plan in ranks:
        assert plan.chosen is None and plan.published is None
        assert strategy == "HybridStrategy"
        assert distance(found["weights"], expected["weights"]) <= 1e-5 * moved
        np.testing.assert_allclose(
            found["evaluated"], expected["evaluated"], rtol=1e-5
        )
    printed = [text for _, text, *_ in ranks]
    assert printed[0].count("to data parallelism: the skewness of its") == 1
    assert re.search(r"\(data parallelism\) .* chosen, the", printed[0])
    assert printed[1] == ""


def test_divides_by_predicted_steps(cluster):
    three = cluster("native", 3)
    found = three.run(placement_functions.divided_by_times, 1e-5)
    # The fewest bytes cross behind either.
    assert {names[-1] for names in found} <= {"pool", "flat"}
    # Alone, a tail worker waits while the others work.
    found = three.run(placement_functions.divided_by_times, 1e9)
    assert found == [None] * 3


def test_too_many_tail_workers(cluster):
    three = cluster("native", 3)
    for message in three.run(placement_functions.too_many_tails, 3):
        assert "num_tail_workers=3 and 3 processes" in message
        assert "at most 2" in message
    five = cluster("native", 5)
    at_servers = {"head_gradients": "server"}
    for message in five.run(placement_functions.too_many_tails, 3, at_servers):
        assert "num_tail_workers=3 and 5 processes" in message
        assert "at most 2" in message


def test_plan(cluster, tmp_path, capsys):
    found = cluster("native", 3).run(placement_functions.planned, str(tmp_path))
    plan = found[0][0]
    assert all(other == plan and is_same for other, is_same in found)
    assert (plan.num_examples, plan.num_workers, plan.num_tails) == (12, 2, 1)
    conv, batch_norm = 3 * 3 * 2 * 4, 2 * 4
    dense, tail_norm, out = 36 * 32, 2 * 32, 32 * 3 + 3
    whole = 4 * (conv + batch_norm + dense + tail_norm + out)
    assert len(plan.costs) == 8  # seven layers before the last, and no split
    assert plan.costs[0].busiest_bytes == pytest.approx(2 * whole * 2 / 3)
    # After "conv", "head", "relu", "pool".
    split = next(c for c in plan.costs if c.place == plan.chosen)
    assert plan.names[plan.chosen] == "pool"
    assert plan.chosen == plan.published
    assert split.head_bytes == 4 * (conv + batch_norm)
    assert split.sent_bytes == 6 * 4 * 36
    # Of two workers each sends half of a ring's two rounds.
    assert split.busiest_bytes == max(2 * 6 * 4 * 36, 6 * 4 * 36 + 4 * 80)
    assert split.star_bytes == 2 * (6 * 4 * 36 + 4 * 80)
    assert all(cost.seconds > 0 for cost in plan.costs)
    times = [plan.worker_seconds[cost.place] for cost in plan.costs[1:]]
    assert 0 < times[0] and times == sorted(times)
    assert "the threshold of the paper's rule -0.2." in plan.markdown()
    command_line.main(["plan", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "before training" in shown and "(data parallelism)" in shown
    assert "the paper's" in shown


def test_plan_of_columns(cluster):
    plans = cluster("native", 4, has_groups=True).run(
        placement_functions.planned_columns
    )
    plan = plans[0]
    assert all(other == plan for other in plans)
    (split,) = [cost for cost in plan.costs if cost.place == plan.chosen]
    assert (plan.names[plan.chosen], split.tail_split) == ("first", "columns")
    # Of 4 examples, 12 numbers from each of the tail's workers: one of 2.
    arriving = 4 * 12 * 4
    divided = 12 * 41, 41 * 17
    gathered = 8 * 4 * (41 + 17) + 8 * 4 * 2 * (12 + 41)
    rest = 2 * 41 + 17 + 17 * 8 + 8 + 8 * 3 + 3
    assert (
        split.busiest_bytes
        == arriving + (2 * arriving + gathered + 2 * 4 * rest) * (2 - 1) / 2
    )
    whole = next(cost for cost in plan.costs if cost.place is None)
    assert whole.busiest_bytes == 2 * 4 * (sum(divided) + rest + 84) * 3 / 4
    assert "tail workers divide" in plan.markdown()
    assert "| columns |" in plan.markdown()


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_workers_begin_alike_and_draw_differently(cluster, engine, tmp_path):
    first, second, tail = cluster(engine, 3, has_groups=True).run(
        placement_functions.shared, str(tmp_path)
    )
    assert tail == []
    for number in (0, 2, 4):
        np.testing.assert_array_equal(first[number], second[number])
        assert (first[number + 1] != second[number + 1]).any()
    assert (first[0] != first[2]).any()


def facts(seconds):
    """Of three wide layers, of which the last has most of the parameters."""
    sizes = [LayerSize("dense", number, 4) for number in (10, 10, 10_000)]
    weights = [4 * size.num_parameters for size in sizes]
    profile = Profile(
        tuple("abc"),
        tuple(sizes),
        seconds,
        8,
        {0: 400, 1: 40},
        tuple(map(GradientSize, weights)),
        update_seconds=(0.0, 0.0, 0.0),
    )
    return ModelFacts(
        profile=profile,
        forward_share=1.0,
        returned_bytes={},
        weight_bytes=tuple(weights),
        output_bytes=(0, 0, 0),
        num_slots=0,
        num_averages=0,
        specs=tuple(
            VariableSpec(f"weights {i}", (size.num_parameters,))
            for i, size in enumerate(sizes)
        ),
    )


def test_rules_of_measured_times():
    cluster = Cluster(4, megabits_per_second=8e-3)
    splits = Splits("fastest", 8, -0.5, "horovod", 3, 1, False, None)
    layers = [keras.layers.Dense(size) for size in (2, 2, 3_000)]
    cutter = Cutter(keras.Sequential([keras.Input((4,)), *layers]))
    measured = Measured(facts((1.0, 1.0, 1.0)), cluster)
    model = Measurable(cutter, lambda: measured)
    plan = splits.plan(model, 1, np.ones(24))
    whole, first, second = plan.costs
    assert [cost.place for cost in plan.costs] == [None, 0, 1]
    assert whole.head_bytes == 4 * 10_020
    assert whole.seconds == pytest.approx(
        3 * 3 / 4 + 1e-3 * 2 * 4 * 10_020 * 3 / 4
    )
    assert first.seconds == pytest.approx(
        3 * (1 / 3 + 2) + 1e-3 * (2 * 24 * 400 + 2 * 40 * 2 / 3)
    )
    assert second.seconds < first.seconds
    assert plan.fastest == splits.place(model) == 1
    times = facts((1.0, 1.0, 1000.0))
    slow = Measurable(cutter, lambda: Measured(times, cluster))
    assert splits.place(slow) is None
    assert splits.why_none(slow) == "no split has a shorter predicted step"
    # Of calls with pairs of examples, workers and a tail by parts have parts.
    for pairs, by_worker, place in [
        ((2,), False, 1),
        ((1,), False, 0),
        ((0,), False, None),
        ((2,), True, None),
    ]:
        of_pairs = dataclasses.replace(facts((1.0, 1.0, 1.0)), pairs=pairs)
        measure = functools.partial(Measured, of_pairs, cluster)
        found = Measurable(cutter, measure)
        asked = dataclasses.replace(splits, is_by_worker=by_worker)
        assert asked.place(found) == place
    assert "whole mini-batches" in asked.why_none(found)
    *_, of_two = split_costs(
        measured.facts.profile, num_workers=2, num_tails=2, num_examples=24
    )
    assert of_two.busiest_bytes == 12 * 40 + 4 * 10_000
