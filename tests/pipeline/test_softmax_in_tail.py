"""A `SampledSoftmax` in a tail on one worker trains as in one process."""

import functools

import numpy as np
import pytest

from tests.conftest import covering, engines
from tests.pipeline import softmax_functions as functions
from tests.pipeline.test_layer_placement import check, distance

_NUM_EXAMPLES = 17  # The last batch has one, of two workers.


@functools.cache
def _expected(rule, embedding):
    """A model's results in one process, how far it moved, and the model."""
    model = functions.compiled(rule, embedding)
    before = model.get_weights()
    found = functions.results(model, _NUM_EXAMPLES)
    return found, distance(found["weights"], before), model


_USUAL = [
    ("native", "adam", "sharded", 3, {}, True),
    ("horovod", "adagrad", "ordinary", 3, {}, True),
]
_MORE = [
    ("native", "sgd", "ordinary", 3, {}, True),
    ("native", "momentum", "sharded", 2, {}, True),
    ("native", "adagrad", "sharded", 4, {}, False),
    ("native", "clipped", "sharded", 3, {"head_gradients": "server"}, True),
    ("native", "scaled", "ordinary", 3, {}, True),
    ("native", "adam", "sharded", 1, {}, True),
]


@pytest.mark.parametrize(
    ("engine", "rule", "embedding", "size", "options", "is_inside"),
    covering(_USUAL + _MORE, _USUAL),
)
def test_as_one_process(
    cluster, engine, rule, embedding, size, options, is_inside
):
    *workers, tail = cluster(engine, size, has_groups=True).run(
        *(functions.train, rule, embedding, _NUM_EXAMPLES, options, is_inside)
    )
    expected, moved, _ = _expected(rule, embedding)
    for rank in (*workers, tail):
        check(rank, expected, moved)
    # Neither the kernel nor its slots.
    assert {rank["kernels held"] for rank in workers} <= {0}
    num_slots = {"sgd": 0, "momentum": 1, "adagrad": 1, "scaled": 1}
    assert tail["kernels held"] == 1 + num_slots.get(rule, 2)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_saved_loaded_exported(cluster, engine, tmp_path):
    ranks = cluster(engine, 3, has_groups=True).run(
        functions.save, "adam", _NUM_EXAMPLES, str(tmp_path), timeout=200
    )
    expected, moved, model = _expected("adam", "sharded")
    plain = functions.ks.export(model)
    slots = [variable.numpy() for variable in plain.optimizer.variables]
    sample = model.get_layer("softmax").sampler.state.numpy()
    gone_on = functions.gone_on(model, _NUM_EXAMPLES)
    gone_on += functions.gone_on(model, _NUM_EXAMPLES)
    for rank in ranks:
        check(rank, expected, moved)
        for name in ("exported predicted", "given predicted"):
            np.testing.assert_allclose(
                rank[name], rank["predicted"], rtol=1e-4, atol=1e-5
            )
        for value, other in zip(rank["slots"], slots, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-3, atol=1e-6)
        for value, other in zip(
            rank["loaded weights"], rank["weights"], strict=True
        ):
            np.testing.assert_array_equal(value, other)
        for state in rank["samples"]:
            np.testing.assert_array_equal(state, sample)
        for name in ("gone on", "loaded gone on"):
            assert distance(rank[name], gone_on) <= 1e-5 * moved


@pytest.mark.parametrize(
    ("engine", "sizes"),
    covering(
        [("native", (3, 2)), ("native", (2, 4)), ("horovod", (3, 2))],
        [("native", (3, 2))],
    ),
)
def test_goes_on_with_other_workers(cluster, engine, sizes, tmp_path):
    for epochs, size in enumerate(sizes, start=1):
        ranks = cluster(engine, size, has_groups=True).run(
            functions.checkpointed, str(tmp_path), epochs, _NUM_EXAMPLES
        )
    expected, moved, _ = _expected("adam", "sharded")
    for weights in ranks:
        assert distance(weights, expected["weights"]) <= 1e-5 * moved


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_draws_a_sample_for_each_part(cluster, engine):
    ranks = cluster(engine, 3, has_groups=True).run(
        *(functions.train, "sgd", "ordinary", 18, {"tail_batches": "by_worker"})
    )
    model = functions.compiled("sgd", "ordinary")
    before = model.get_weights()
    weights = functions.fit_by_parts(model, 18, num_parts=2)
    moved = distance(weights, before)
    assert moved > 0.1
    x, y, of_examples = functions.data(18)
    evaluated = model.evaluate(x, y, sample_weight=of_examples, verbose=0)
    for rank in ranks:
        assert distance(rank["weights"], weights) <= 1e-5 * moved
        np.testing.assert_allclose(rank["evaluated"], evaluated, rtol=1e-5)


def test_refused(cluster):
    for found in cluster("native", 3).run(functions.refused):
        for name in ("tied", "tied, by a rule"):
            assert (
                "The kernel of 'softmax' is the table of 'rows'"
                in (found[name])
            )
            assert "Leave out `table`" in found[name]
        assert "Received: 'softmax' in the head" in found["head"]
        for name in ("two", "columns"):
            assert "'softmax' in the tail of 2 processes" in found[name]
            assert "Expected: num_tail_workers=1" in found[name]
        assert "The optimizer Lamb cannot be applied" in found["rule"]
        assert "Received: a SampledSoftmax" in found["pipeline"]
        assert "under `ks.LayerPlacementStrategy`" in found["pipeline"]


def test_plan(cluster):
    plan, *others = cluster("native", 3).run(functions.planned, 12)
    assert all(other == plan for other in others)
    # Behind the embedding, and in front of the softmax.
    assert list(plan.names.values()) == ["rows", "head", "wide", "hidden"]
    whole, *splits = plan.costs
    # Of 6 or 4 examples: numbers of rows of 2 bytes, twice a row of float32.
    of_embedding, of_classes = 2 + 8 * 5, 2 + 8 * functions.DIM + 2 + 8
    assert whole.row_bytes == 16 * of_embedding + (16 + 20) * of_classes
    assert all(cost.row_bytes == 24 * of_embedding for cost in splits)
