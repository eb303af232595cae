"""N stages train as one process that accumulates the micro-batches does."""

import contextlib
import functools
import itertools

import keras
import numpy as np
import pytest

from keras_sparsity import PipelineStrategy
from tests import pipeline_functions
from tests.conftest import covering, engines

_CUTS = {
    "dense": [["dense_1"], ["dense_0", "dense_2"]],
    "branches": [["norm"], ["rows", "both"]],
    "nested": [["middle/inner/norm"], ["dense", "middle/inner/norm"]],
}


@functools.cache
def _expected(model, optimizer, num_examples):
    before = {v.path: v.numpy() for v in pipeline_functions.made(model).weights}
    weights, losses, network = pipeline_functions.trained(
        model, optimizer, num_examples
    )
    return before, weights, losses, network


def check(ranks, model, optimizer, num_examples, replicas=1):
    before, weights, losses, network = _expected(model, optimizer, num_examples)
    x, y = pipeline_functions.data(model, num_examples)
    options = {"batch_size": pipeline_functions.BATCH_SIZE, "verbose": 0}
    evaluated = network.evaluate(x, y, return_dict=True, **options)
    predicted = keras.tree.flatten(network(x))
    trained = {}
    for rank in ranks:
        trained.update(rank["weights"])
        scale = pipeline_functions.scale_of(network.optimizer)
        assert rank["scale"] == scale
        assert model != "mixed" or scale[0] < 2**18
        np.testing.assert_allclose(rank["history"]["loss"], losses, rtol=1e-5)
        assert rank["evaluated"] == pytest.approx(evaluated, rel=1e-4)
        assert rank["history"] == ranks[0]["history"]
        for mine, whole in zip(
            keras.tree.flatten(rank["predicted"]), predicted, strict=True
        ):
            np.testing.assert_allclose(mine, whole, rtol=1e-4, atol=1e-5)
        for value, path in zip(rank["all_weights"], weights, strict=True):
            np.testing.assert_allclose(
                value, weights[path], rtol=1e-4, atol=1e-5
            )
    if replicas:
        # Each weight on one rank of each replica alone.
        num_held = sum(len(rank["weights"]) for rank in ranks)
        assert num_held == replicas * len(weights)
    moved = _distance(weights, before)
    assert moved > 0.1
    assert _distance(trained, weights) <= 1e-5 * moved


def _distance(weights, others):
    assert weights.keys() == others.keys()
    squares = [
        np.square(value.astype("float64") - others[path]).sum()
        for path, value in weights.items()
    ]
    return np.sqrt(sum(squares))


# What each number of stages is trained with, on each engine.
_PRODUCT = list(
    itertools.product(
        ("native", "horovod"),
        ("dense", "branches"),
        ("sgd", "momentum", "adam"),
        ("gpipe", "1f1b"),
    )
)


@pytest.mark.parametrize(
    ("engine", "model", "optimizer", "schedule"),
    covering(
        _PRODUCT,
        [("native", "branches", "momentum", "gpipe")],
    ),
)
def test_two_stages(cluster, engine, model, optimizer, schedule):
    cuts = _CUTS[model][0]
    # Of 17 examples the last mini-batch has one, for four micro-batches.
    num_examples = 17
    ranks = cluster(engine, 2).run(
        pipeline_functions.train, model, optimizer, cuts, schedule, num_examples
    )
    check(ranks, model, optimizer, num_examples)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_micro_batches_are_steps_that_keras_accumulates(schedule):
    """Of whole mini-batches: Keras goes on behind the last one of an epoch."""
    x, y = pipeline_functions.data("branches", 24)
    before = pipeline_functions.made("branches").get_weights()
    found = []
    for scope, batch_size, options in [
        (PipelineStrategy(schedule, num_micro_batches=2).scope, 8, {}),
        (contextlib.nullcontext, 4, {"gradient_accumulation_steps": 2}),
    ]:
        model = pipeline_functions.made("branches")
        with scope():
            model.compile(
                keras.optimizers.Adam(0.01, epsilon=1e-3, **options),
                ["mse", "mae"],
            )
        model.fit(x, y, batch_size, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
    moved, apart = (
        _distance(dict(enumerate(found[1])), dict(enumerate(others)))
        for others in (before, found[0])
    )
    assert moved > 0.1
    assert apart <= 1e-5 * moved


@pytest.mark.parametrize("schedule", ["gpipe", "stash"])
def test_micro_batches_without_examples_change_no_states(schedule):
    """Of a batch of one example: statistics, random states, others."""
    x, y = pipeline_functions.data("dense", 1)
    found, logs = [], []
    for scope in (
        contextlib.nullcontext,
        PipelineStrategy(schedule, num_micro_batches=4).scope,
    ):
        watched = pipeline_functions.made("watched line")
        with scope():
            watched.compile("sgd", "mse")
        logs.append(
            watched.evaluate(
                *pipeline_functions.data("dense", 5),
                batch_size=4,
                verbose=0,
                return_dict=True,
            )
        )
        model = pipeline_functions.made("line32 following")
        with scope():
            model.compile("sgd", "mse")
        model.fit(x, y, epochs=2, verbose=0)
        found.append([v.numpy() for v in model.non_trainable_variables])
    # The mean and variance, a random state, and a layer's own.
    assert len(found[0]) == 4
    # What a layer's metrics have counted, which are no such variables.
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)
    assert "seen" in logs[0]
    for value, expected in zip(*found[::-1], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("engine", "model", "optimizer", "schedule"),
    covering(
        _PRODUCT
        + [
            (engine, "nested", "adam", "1f1b")
            for engine in ("native", "horovod")
        ],
        [("horovod", "dense", "sgd", "1f1b")],
    ),
)
def test_three_stages(cluster, engine, model, optimizer, schedule):
    cuts = _CUTS[model][1]
    ranks = cluster(engine, 3, has_groups=True).run(
        pipeline_functions.train, model, optimizer, cuts, schedule, 22
    )
    check(ranks, model, optimizer, 22)


@pytest.mark.parametrize(
    ("engine", "model", "optimizer", "schedule"),
    covering(
        _PRODUCT
        + [
            (engine, *case)
            for engine in ("native", "horovod")
            for case in [
                ("branches", "clipped", "1f1b"),
                ("mixed", "scaled", "gpipe"),
            ]
        ],
        # Three have all that four have; norms and finiteness are below.
        [],
    ),
)
def test_four_stages(cluster, engine, model, optimizer, schedule):
    """Also what needs the gradients of all stages: norms, finiteness."""
    cuts = {
        "dense": ["dense_0", "dense_1", "dense_2"],
        "branches": ["rows", "first", "both"],
        "mixed": ["dense_0", "dense_1", "dense_2"],
    }[model]
    ranks = cluster(engine, 4, has_groups=True).run(
        pipeline_functions.train, model, optimizer, cuts, schedule, 22
    )
    check(ranks, model, optimizer, 22)


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_loss_scaling_and_a_norm_of_all_gradients(cluster, engine):
    ranks = cluster(engine, 2).run(
        pipeline_functions.train, "mixed", "scaled", ["dense_1"], "1f1b", 22
    )
    check(ranks, "mixed", "scaled", 22)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_messages_of_16_bits(cluster, engine):
    """As one process that rounds what crosses the cut, both ways."""
    ranks = cluster(engine, 2).run(
        pipeline_functions.train,
        "dense",
        "momentum",
        ["dense_1"],
        "1f1b",
        22,
        "bfloat16",
    )
    check(ranks, "rounded", "momentum", 22)
    rounded, exact = (
        _expected(model, "momentum", 22)[1] for model in ("rounded", "dense")
    )
    assert _distance(rounded, exact) > 1e-3


# The same link rounds them as above.
@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
def test_messages_of_16_bits_without_a_flush(cluster, engine):
    exact, rounded = (
        cluster(engine, 2).run(
            pipeline_functions.train,
            "dense",
            "momentum",
            ["dense_1"],
            "spectrain",
            22,
            wire_dtype,
        )[0]
        for wire_dtype in (None, "bfloat16")
    )
    assert 0 < _distance(rounded["weights"], exact["weights"]) < 0.02
    # Losses travel in their own dtype.
    np.testing.assert_allclose(
        rounded["history"]["loss"], exact["history"]["loss"], rtol=1e-2
    )
