"""R pipelines side by side train as one process, or one pipeline, does."""

import re

import numpy as np
import pytest

from tests import pipeline_functions
from tests.conftest import engines
from tests.pipeline import replica_functions, test_in_flight, test_steps

# Of 17 examples the last mini-batch has one: a replica has none of it.
_NUM_EXAMPLES = 17


@pytest.mark.parametrize(
    ("engine", "model", "optimizer", "cuts", "schedule"),
    [
        ("native", "masks", "clipped", ["rows"], "1f1b"),
        pytest.param(
            "horovod",
            "dense",
            "momentum",
            ["dense_1"],
            "gpipe",
            marks=engines("horovod")[0].marks,
        ),
    ],
)
def test_with_a_flush(cluster, engine, model, optimizer, cuts, schedule):
    ranks = cluster(engine, 4, has_groups=True).run(
        pipeline_functions.train,
        model,
        optimizer,
        cuts,
        schedule,
        _NUM_EXAMPLES,
        None,
        2,
    )
    for own, other in zip(ranks[::2], ranks[1::2], strict=True):
        assert own["weights"].keys() == other["weights"].keys()
        for path, value in own["weights"].items():
            np.testing.assert_array_equal(value, other["weights"][path])
    test_steps.check(ranks, model, optimizer, _NUM_EXAMPLES, replicas=2)


# Of one stage alone in `test_shared_stages.py`, by the same sums.
@pytest.mark.all_cells
@pytest.mark.parametrize(
    ("schedule", "rule"), [("stash", "momentum"), ("spectrain", "adam")]
)
def test_without_a_flush(cluster, schedule, rule):
    """As the oracle does, which computes whole mini-batches."""
    # The last mini-batch has one example.
    num_examples = 57
    ranks = cluster("native", 4, has_groups=True).run(
        pipeline_functions.train_in_flight,
        rule,
        ["dense_1"],
        schedule,
        "paper",
        num_examples,
        "plain line",
        2,
    )
    test_in_flight.check(
        ranks,
        rule,
        schedule,
        "paper",
        [["dense_0", "dense_1"], ["dense_2", "dense_3", "out"]],
        num_examples,
        "plain line",
    )


# Ranks of a stage have the same weights: what `test_with_a_flush` reads.
@pytest.mark.all_cells
def test_resumed_to_the_bit(cluster, tmp_path):
    ranks = cluster("native", 4, has_groups=True).run(
        replica_functions.resumed, str(tmp_path)
    )
    for history, weights, others in ranks:
        for value, other in zip(weights, others, strict=True):
            np.testing.assert_array_equal(value, other)
        assert history == ranks[0][0]
        # Of mini-batches of one size.
        np.testing.assert_allclose(
            np.add(history["tokens_loss"], history["two_loss"]),
            history["loss"],
            rtol=1e-5,
        )


def test_plan_statistics_and_errors(cluster):
    ranks = cluster("native", 4, has_groups=True).run(replica_functions.planned)
    for number, (plan, statistics, errors) in enumerate(ranks):
        for message, pattern in zip(errors, _ERRORS, strict=True):
            assert re.search(pattern, message), message
        assert plan == ranks[0][0]
        if number >= 2:
            assert statistics is None
            continue
        for value, expected in zip(statistics, _statistics(), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5)
    _check_plan(ranks[0][0])


_ERRORS = [
    "stages=5, replicas=1 and 4 processes.*stages=1 with replicas=4 or "
    "stages=2 with replicas=2 or stages=4 with replicas=1",
    "stages=None, replicas=3 and 4 processes",
    "stages=4, replicas=2 and 4 processes",
]


def statistics(x, parts_of_ranks):
    """The mean of two ranks' statistics, of 4 and 3 examples.

    Args:
        x: the examples.
        parts_of_ranks: for each rank, the slices that it normalizes apart.
    """
    model = replica_functions.normed()
    kernel, bias = model.get_layer("dense").get_weights()
    made = np.tanh(x @ kernel + bias)
    means, variances = [], []
    for parts in parts_of_ranks:
        mean, variance = np.zeros(7), np.ones(7)
        for part in (made[each] for each in parts):
            kept = replica_functions.MOMENTUM
            mean = kept * mean + (1 - kept) * part.mean(0)
            variance = kept * variance + (1 - kept) * part.var(0)
        means.append(mean)
        variances.append(variance)
    return [np.average(each, 0, (4, 3)) for each in (means, variances)]


def _statistics():
    x, _ = pipeline_functions.data("dense", 8)
    parts = [[slice(0, 2), slice(2, 4)], [slice(4, 6), slice(6, 7)]]
    return statistics(x[:7], parts)


def _check_plan(plan):
    assert (plan.num_examples, plan.replicas) == (8, 2)
    assert plan.num_micro_batches == 2
    first, second = plan.stages
    assert first.layers == ("dense", "norm") and second.layers == ("out",)
    # A kernel, bias, scale and offset; a kernel and bias.
    num_bytes = 4 * (6 * 7 + 3 * 7), 4 * (7 * 2 + 2)
    assert (first.gradient_bytes, second.gradient_bytes) == num_bytes
    # Of a replica's four examples.
    activation = 4 * 4 * 7
    assert (first.sent_bytes, second.returned_bytes) == (activation,) * 2
    # Of two ranks each sends half, twice, and receives as much.
    assert [plan.summed_bytes(stage) for stage in plan.stages] == [
        2 * each for each in num_bytes
    ]
    assert plan.busiest_bytes == 2 * activation + 2 * num_bytes[0]
    assert plan.allreduce_bytes == 3 * sum(num_bytes)
    text = plan.markdown()
    assert "| sums gradients |" in text and "| 504 bytes |" in text
    assert "8 examples, divided among 2 replicas, in 2 micro-batches" in text
