"""The ranks of a stage share each mini-batch: the result of one process."""

import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf import keras_functional
from keras_sparsity.launch import command_line
from keras_sparsity.pipeline.micro_batches import MicroBatches
from keras_sparsity.stages.cutting import shared
from tests import pipeline_functions
from tests.conftest import engines
from tests.pipeline import (
    replica_functions,
    saved_state_functions,
    shared_functions,
    test_in_flight,
    test_replicas,
    test_steps,
)

_ON_HOROVOD = engines("horovod")[0].marks
_MORE = pytest.mark.all_cells


@pytest.mark.parametrize(
    ("engine", "model", "optimizer", "cuts", "schedule", "replicas", "parts"),
    [
        # Micro-batches of one example, which one of two ranks has.
        ("native", "dense", "momentum", ["dense_1"], "1f1b", [1, 2], 3),
        pytest.param(
            *("native", "masks", "adam", ["rows"], "1f1b", [2, 1], 4),
            marks=_MORE,
        ),
        pytest.param(
            *("horovod", "dense", "adam", ["dense_1"], "gpipe", [1, 2], 3),
            marks=_ON_HOROVOD,
        ),
        pytest.param(
            *("native", "masks", "clipped", ["rows", "dense"], "1f1b"),
            *([1, 2, 1], 4),
            marks=_MORE,
        ),
        pytest.param(
            *("native", "dense", "momentum", ["dense_1"], "1f1b"),
            *([2, 2], 3),
            marks=_MORE,
        ),
    ],
)
def test_with_a_flush(
    cluster, engine, model, optimizer, cuts, schedule, replicas, parts
):
    # Of 17 examples the last mini-batch has one.
    num_examples = 17
    ranks = cluster(engine, sum(replicas), has_groups=True).run(
        shared_functions.trained,
        *(model, optimizer, cuts, schedule, num_examples, replicas, parts),
    )
    _check_held(ranks, replicas)
    test_steps.check(ranks, model, optimizer, num_examples, replicas=None)


def _check_held(ranks, replicas):
    """Each weight on the ranks of one stage alone, with the same value."""
    ends = list(itertools.accumulate(replicas))
    stages = [
        ranks[end - number : end]
        for number, end in zip(replicas, ends, strict=True)
    ]
    held = []
    for stage in stages:
        held += stage[0]["weights"]
        for other in stage[1:]:
            assert other["weights"].keys() == stage[0]["weights"].keys()
            for path, value in other["weights"].items():
                np.testing.assert_array_equal(value, stage[0]["weights"][path])
    assert len(held) == len(set(held)) == len(ranks[0]["all_weights"])


@pytest.mark.parametrize(
    ("engine", "rule", "schedule", "target", "replicas", "parts"),
    [
        ("native", "momentum", "spectrain", "paper", [1, 2], 1),
        ("native", "adam", "spectrain", "paper", [1, 2], 3),
        pytest.param(
            *("native", "adam", "stash", "paper", [2, 1], 1), marks=_MORE
        ),
        pytest.param(
            *("horovod", "adam", "spectrain", "sequential", [1, 2], 1),
            marks=_ON_HOROVOD,
        ),
        pytest.param(
            *("native", "sgd", "vanilla", "paper", [2, 3], 2), marks=_MORE
        ),
    ],
)
def test_without_a_flush(
    cluster, engine, rule, schedule, target, replicas, parts
):
    """As the oracle does, which computes whole mini-batches."""
    num_examples = 57  # the last mini-batch has one example
    ranks = cluster(engine, sum(replicas), has_groups=True).run(
        pipeline_functions.train_in_flight,
        *(rule, ["dense_1"], schedule, target, num_examples, "plain line"),
        *(replicas, parts),
    )
    test_in_flight.check(
        *(ranks, rule, schedule, target),
        [["dense_0", "dense_1"], ["dense_2", "dense_3", "out"]],
        *(num_examples, "plain line"),
    )


def test_ranks_that_are_left_share_the_slowest_stage(cluster, tmp_path, capsys):
    ranks = cluster("native", 3, has_groups=True).run(
        shared_functions.chosen, str(tmp_path)
    )
    plans, weights = ranks[0]
    for others, values in ranks:
        assert others == plans
        for each, expected in zip(values, weights, strict=True):
            for value, other in zip(each, expected, strict=True):
                np.testing.assert_array_equal(value, other)
    slow_end, slow_begin = ((0,), (1, 2)), ((0, 1), (2,))
    assert [tuple(stage.ranks for stage in plan.stages) for plan in plans] == [
        *(slow_end, slow_end),
        *(slow_begin, slow_end),
    ]
    first = plans[0].stages[0]
    # All 9 examples; a rank behind has 5 of them at most.
    assert first.sent_bytes == 4 * 9 * 8
    assert plans[0].stages[1].returned_bytes == 4 * 5 * 8
    # A kernel of 16 and a bias of 2: each of two ranks sends half, twice.
    sums = [plans[0].summed_bytes(stage) for stage in plans[0].stages]
    assert sums == [0, 2 * 4 * 18]
    command_line.main(["plan", str(tmp_path)])
    shown = capsys.readouterr().out
    assert re.search(r"ranks +layers", shown) and "1, 2" in shown


def test_refusals(cluster):
    for found in cluster("native", 3, has_groups=True).run(
        shared_functions.refused
    ):
        for message, pattern in zip(found, _REFUSALS, strict=True):
            assert message and re.search(pattern, message), message


_REFUSALS = [
    r"sum is the number of processes.*replicas=\[1, 1\] and 3 processes",
    r"stages=3, replicas=\[1, 2\] and 3 processes",
    r"replicas\[1\]` must be a positive integer. Received: .*=0",
    "replicas=2 and 3 processes",
    r"3 processes train 3 stages.*cut 2 times. Received: \['first'\]",
    "1 possible cuts cannot be cut into 3 stages",
    "'fixed' has batches of 8.*a PipelineStrategy.*into 2 parts.*one process f",
]


def test_statistics_are_the_mean_of_the_ranks(cluster):
    """Each rank normalizes its part of a micro-batch by itself.

    And draws for its examples what no other rank draws.
    """
    ranks = cluster("native", 3, has_groups=True).run(
        shared_functions.statistics
    )
    x, _ = pipeline_functions.data("dense", 7)
    # Micro-batches of 4 and 3 examples, in two pieces each.
    expected = test_replicas.statistics(
        x, [[slice(0, 2), slice(4, 6)], [slice(2, 4), slice(6, 7)]]
    )
    for found, _ in ranks[:2]:
        for value, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-5)
    assert ranks[2][0] is None
    for _, predicted in ranks:
        assert len(np.unique(predicted)) == 8


# The limit is the plan's, as in `test_memory.py`.
@_MORE
def test_limit_of_memory(cluster):
    for of_stages, errors in cluster("native", 3, has_groups=True).run(
        shared_functions.limited
    ):
        in_time, too_much = errors
        assert in_time is None
        assert f"holds {max(of_stages):,} bytes in a step" in too_much


# Ranks of a stage have the same weights: what `test_with_a_flush` reads.
@_MORE
def test_saved_and_loaded(cluster, tmp_path):
    ranks = cluster("native", 3, has_groups=True).run(
        replica_functions.resumed, str(tmp_path), [1, 2]
    )
    for history, weights, others in ranks:
        for value, other in zip(weights, others, strict=True):
            np.testing.assert_array_equal(value, other)
        assert history == ranks[0][0]


def test_resumed_from_a_checkpoint(cluster, tmp_path):
    """With states of dropout that differ in a stage, to the bit."""
    ranks = cluster("native", 3, has_groups=True).run(
        *(saved_state_functions.train_and_resume, "pipeline"),
        *(("spectrain", "sgd", ["dense_1"], [2, 1]), str(tmp_path), 59, 19),
    )
    for whole, stopped, resumed in ranks:
        for value, other in zip(whole[0], resumed[0], strict=True):
            np.testing.assert_array_equal(value, other)
        for path, value in whole[1].items():
            np.testing.assert_array_equal(value, resumed[1][path])
        assert whole[2:] == resumed[2:]
        assert np.abs(stopped[0][0] - whole[0][0]).max() > 1e-4


@pytest.mark.parametrize("num_examples", [1, 5, 17, 1000])
def test_pieces_of_micro_batches(num_examples):
    """Their sizes differ by one at most, and cost a few operations."""
    number = 3

    def traced(places, num_pieces):
        def sizes(x):
            batches = MicroBatches(functional, (x,), number, num_pieces)
            return [batches.number(place) for place in places]

        return tf.function(sizes, autograph=False).get_concrete_function(x)

    def expected(num_pieces):
        return [
            len(piece)
            for part in np.array_split(np.arange(num_examples), number)
            for piece in np.array_split(part, num_pieces)
        ]

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    functional = keras_functional.functional_of(model)
    x = tf.zeros([num_examples, 1])
    found = traced(range(number * 12), 12)(x)
    np.testing.assert_array_equal(found, expected(12))
    # Of 7, 8 and 9 ranks, the second of eight, and all of a part.
    pieces = expected(504)
    for own in (range(504 + 63, 504 + 2 * 63), range(1008, 1512)):
        function = traced([own], 504)
        assert len(function.graph.get_operations()) < 100
        assert int(function(x)[0]) == sum(pieces[own.start : own.stop])


def test_the_cuts_and_the_ranks_are_the_best_of_all():
    """By trying all of them."""
    draws = np.random.default_rng(0)
    for _ in range(20):
        seconds, sums, again = draws.uniform(1, 9, (3, 6)).tolist()
        crossing = dict(enumerate(draws.uniform(0, 4, 5).tolist()))
        for num_stages, size in ((1, 3), (2, 2), (2, 4), (3, 5)):
            left = size - num_stages
            possible = [range(1, left + 2)] * num_stages
            args = seconds, crossing, [each / 9 for each in sums], again
            found = shared(seconds, list(crossing), possible, size, *args[1:])
            tried = [
                _slowest(cuts, ranks, *args)
                for cuts in itertools.combinations(crossing, num_stages - 1)
                for ranks in itertools.product(*possible)
                if sum(ranks) == size
            ]
            assert sum(found[1]) == size
            assert np.isclose(_slowest(*found, *args), min(tried))


def _slowest(cuts, ranks, seconds, crossing, sums, again):
    bounds = [0, *(cut + 1 for cut in cuts), len(seconds)]
    costs = [crossing[cut] for cut in cuts]
    for begin, end, number in zip(bounds, bounds[1:], ranks, strict=False):
        work, gradients = sum(seconds[begin:end]), sum(sums[begin:end])
        if end < len(seconds):
            work += sum(again[begin:end])
        costs.append((work + 2 * (number - 1) * gradients) / number)
    return max(costs)
