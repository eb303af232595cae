"""What a user's function sees of aggregated gradients, and may change."""

import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests.aggregation_functions import (
    BATCH,
    DIM,
    RATE,
    ROWS,
    STEPS,
    examples,
    halve,
    identity,
    ours,
    reference,
    start,
)
from tests.conftest import engines


class Noting:
    """Notes all that it sees, when it runs, and halves it."""

    def __init__(self):
        self.steps = []
        self.traces = 0
        self.converted = set()

    def __call__(self, gradients, variables):
        self.traces += 1
        # AutoGraph gives its versions of functions such names.
        self.converted |= {
            frame.name
            for frame in traceback.extract_stack()
            if frame.name.startswith("tf__")
        }
        rows = [isinstance(g, tf.IndexedSlices) for g in gradients]
        assert rows == [True, True, False]
        assert [tuple(v.shape) for v in variables] == [v.shape for v in start()]
        flat = tf.nest.flatten(
            [(g.indices, g.values) for g in gradients[:2]] + gradients[2:]
        )
        tf.numpy_function(self._note, flat, [])
        return halve(gradients, variables)

    def _note(self, *arrays):
        self.steps.append([np.array(array) for array in arrays])


def fit_with(noting, num_partitions, optimizer, **options):
    strategy = ks.HybridStrategy(transform_gradients=noting)
    model = ours(num_partitions)
    with strategy.scope():
        model.compile(optimizer, "mse", **options)
    assert model.optimizer.transform_gradients is noting
    assert "transform_gradients" not in model.optimizer.get_config()
    ids, targets = examples()
    model.fit(ids, targets, BATCH, shuffle=False, verbose=0)
    assert not noting.converted
    return noting.steps, model.get_weights()


def loop_with(noting, num_partitions):
    """A loop with loss scaling that skips its second step."""
    strategy = ks.HybridStrategy()
    model = ours(num_partitions)
    optimizer = ks.HybridOptimizer(
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(RATE), initial_scale=16.0
        ),
        transform_gradients=noting,
    )

    @tf.function
    def train(ids, targets, weight):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(ids) - targets) ** 2) / BATCH
            loss = optimizer.scale_loss(loss * weight)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    ids, targets = examples()
    for step in range(STEPS):
        own = BATCH // strategy.size
        begin = step * BATCH + strategy.rank * own
        # Only rank 0 overflows; all skip.
        weight = np.inf if (step, strategy.rank) == (1, 0) else 1.0
        part = ids[begin : begin + own], targets[begin : begin + own]
        strategy.run(train, (*map(tf.constant, part), tf.constant(weight)))
    # The loop alone: conversion takes seconds, and one of the library's
    # functions has it convert all that it calls.
    assert noting.converted == {"tf__train"}
    return noting.steps, model.get_weights()


def train_noting():
    sgd = keras.optimizers.SGD
    return {
        # As many partitions as ranks, several on one, none on the other.
        "fit": fit_with(Noting(), 2, sgd(RATE)),
        "steps_per_execution": fit_with(
            Noting(), 5, sgd(RATE), steps_per_execution=2
        ),
        "eager": fit_with(Noting(), 1, sgd(RATE), run_eagerly=True),
        "loss scaling": loop_with(Noting(), 3),
    }


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_gradients_are_seen_once_and_whole(cluster, engine):
    results = cluster(engine, 2).run(train_noting)
    for case in results[0]:
        skipped = (1,) if case == "loss scaling" else ()
        expected, weights = reference((0.5,) * 3, skipped)
        seen = [by_rank[case][0] for by_rank in results]
        # Once per step, and not in one that is skipped.
        assert [len(steps) for steps in seen] == [len(expected)] * 2, case
        for step, (touched, gradients) in enumerate(expected):
            of_ranks = [steps[step] for steps in seen]
            check_rows(of_ranks, touched, gradients)
        for by_rank in results:
            for ours_, theirs in zip(by_rank[case][1], weights, strict=True):
                np.testing.assert_allclose(
                    ours_, theirs, rtol=1e-4, atol=1e-6, err_msg=case
                )


def check_rows(of_ranks, touched, gradients):
    """The table's rows at their owners, all others on every rank."""
    owned = np.concatenate([arrays[0] for arrays in of_ranks])
    values = np.concatenate([arrays[1] for arrays in of_ranks])
    assert sorted(owned) == list(touched)  # by their ids in the whole table
    np.testing.assert_allclose(
        values, gradients[0][owned], rtol=1e-4, atol=1e-6
    )
    for _, _, ids, of_rows, of_kernel in of_ranks:
        assert sorted(ids) == list(touched)
        np.testing.assert_allclose(
            of_rows, gradients[1][ids], rtol=1e-4, atol=1e-6
        )
        np.testing.assert_allclose(
            of_kernel, gradients[2], rtol=1e-4, atol=1e-6
        )


def one_step(optimizer, hook, sparse_updates="exact", **options):
    """A table and a kernel after steps in this process."""
    table = ks.ShardedTable(ROWS, DIM)
    variables = [table.variable, keras.Variable(start()[2])]
    table.assign(start()[0])
    optimizer = ks.HybridOptimizer(
        optimizer, sparse_updates, transform_gradients=hook, **options
    )
    rng = np.random.default_rng(8)
    for _ in range(STEPS):
        slices = tf.IndexedSlices(
            tf.constant(rng.normal(size=(5, DIM)), tf.float32),
            tf.constant([7, 1, 7, 0, 7]),
            tf.constant([ROWS, DIM]),
        )
        kernel = tf.constant(rng.normal(size=start()[2].shape), tf.float32)
        optimizer.apply([slices, kernel], variables)
    return [v.numpy() for v in variables + optimizer.variables]


@pytest.mark.parametrize("mode", ["exact", "lazy"])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"clipnorm": 0.1}, {"gradient_accumulation_steps": 2}],
    ids=str,
)
def test_a_function_that_only_looks_changes_nothing(mode, arguments):
    made = [keras.optimizers.Adam(0.1, **arguments) for _ in range(2)]
    looked = one_step(made[0], identity, mode)
    plain = one_step(made[1], None, mode)
    for ours_, theirs in zip(looked, plain, strict=True):
        np.testing.assert_allclose(ours_, theirs, rtol=1e-6, atol=1e-7)


def test_is_called_before_clipping():
    def enlarge(gradients, variables):
        del variables
        return [tf.math.scalar_mul(100.0, g) for g in gradients]

    table, kernel, *_ = one_step(
        keras.optimizers.SGD(1.0, clipvalue=0.1), enlarge
    )
    moved = np.abs(kernel - start()[2])
    assert moved.max() <= 0.1 * STEPS + 1e-6
    assert np.abs(table - start()[0]).max() <= 0.1 * STEPS + 1e-6


def without_rows(gradients, variables):
    del variables
    rows, kernel = gradients
    return [tf.convert_to_tensor(rows), kernel]


def other_rows(gradients, variables):
    del variables
    rows, kernel = gradients
    swapped = tf.IndexedSlices(rows.values, rows.indices[::-1])
    return [swapped, kernel]


def other_dtype(gradients, variables):
    del variables
    rows, kernel = gradients
    return [rows, tf.cast(kernel, tf.float64)]


def other_shape(gradients, variables):
    del variables
    rows, kernel = gradients
    return [rows, kernel[1:]]


@pytest.mark.parametrize(
    "hook,message",
    [
        (lambda gradients, variables: None, "NoneType.*|must return the list"),
        (lambda gradients, variables: gradients[:1], "Received: 1"),
        (lambda gradients, variables: [None, None], "received: None"),
        (without_rows, "Expected: tf.IndexedSlices.*Change the values only"),
        (other_rows, "leave the rows of embeddings as they are"),
        (other_dtype, "float64.*Expected: .*float32"),
        (other_shape, r"\(11, 1\).*Expected: \(12, 1\)"),
    ],
)
def test_what_it_returns_is_checked(hook, message):
    error = (ValueError, tf.errors.InvalidArgumentError)
    with pytest.raises(error, match=f"(?s)transform_gradients.*{message}"):
        one_step(keras.optimizers.SGD(0.1), hook)


def test_the_strategy_and_the_optimizer_must_agree():
    strategy = ks.HybridStrategy(transform_gradients=halve)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    own = ks.HybridOptimizer("sgd", transform_gradients=identity)
    with strategy.scope():
        with pytest.raises(ValueError, match="different.*one of them"):
            model.compile(own, "mse")
        model.compile(ks.HybridOptimizer("sgd", dense_aggregation="sum"))
    # One without a function gets it, and keeps its own options.
    assert model.optimizer.transform_gradients is halve
    assert model.optimizer.dense_aggregation == "sum"
