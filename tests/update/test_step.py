"""Mean or sum, of dense gradients and of gradients of rows."""

import contextlib

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
    examples,
    halve,
    ours,
    reference,
)
from tests.conftest import engines

# Of dense gradients, of sparse ones, whether under loss scaling.
CHOICES = (
    ("sum", "mean", False),
    ("mean", "sum", False),
    ("sum", "sum", True),
)


def fit_each_choice():
    """Weights after training, by choice."""
    results = {}
    ids, targets = examples()
    for dense, sparse, scale in CHOICES:
        strategy = ks.HybridStrategy(
            dense_aggregation=dense, sparse_aggregation=sparse
        )
        optimizer = keras.optimizers.SGD(RATE)
        if scale:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        model = ours()
        with strategy.scope():
            model.compile(optimizer, "mse")
        model.fit(ids, targets, BATCH, shuffle=False, verbose=0)
        config = model.optimizer.get_config()
        assert config["dense_aggregation"] == dense
        assert config["sparse_aggregation"] == sparse
        results[dense, sparse, scale] = model.get_weights()
    return results


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_dense_and_sparse_are_chosen_apart(cluster, engine):
    for results in cluster(engine, 2).run(fit_each_choice):
        for (dense, sparse, scale), weights in results.items():
            of_rows = 2 if sparse == "sum" else 1
            of_dense = 2 if dense == "sum" else 1
            _, expected = reference((of_rows, of_rows, of_dense))
            for ours_, theirs in zip(weights, expected, strict=True):
                np.testing.assert_allclose(
                    ours_,
                    theirs,
                    rtol=1e-4,
                    atol=1e-6,
                    err_msg=f"{dense}, {sparse}, {scale}",
                )


def sum_of_own_means():
    """One step with "sum", of a loop in which each rank takes its own mean."""
    strategy = ks.HybridStrategy()
    table = ks.ShardedTable(ROWS, DIM, initializer="zeros")
    kernel = keras.Variable(np.zeros(DIM, "float32"))
    optimizer = ks.HybridOptimizer(
        keras.optimizers.SGD(1.0),
        dense_aggregation="sum",
        sparse_aggregation="sum",
    )
    values = own_values(strategy.rank)

    def step():
        with tf.GradientTape() as tape:
            rows = table.gather(tf.constant([1, 1, 3])) + kernel.value
            own_mean = tf.reduce_mean(tf.reduce_sum(rows * values, -1))
            loss = own_mean / strategy.num_replicas_in_sync
        variables = [table.variable, kernel]
        optimizer.apply(tape.gradient(loss, variables), variables)

    strategy.run(step)
    return table.read(), kernel.numpy()


def own_values(rank):
    return np.random.default_rng(rank).normal(size=(3, DIM)).astype("float32")


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_sum_is_of_each_ranks_own_mean(cluster, engine):
    values = own_values(0) + own_values(1)
    rows = np.zeros((ROWS, DIM))
    np.add.at(rows, [1, 1, 3], values / 3)
    for table, kernel in cluster(engine, 2).run(sum_of_own_means):
        np.testing.assert_allclose(table, -rows, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(kernel, -values.mean(0), rtol=1e-5)


def test_aggregation_is_part_of_the_configuration():
    optimizer = ks.HybridOptimizer(
        "adam", sparse_aggregation="sum", transform_gradients=halve
    )
    config = keras.optimizers.serialize(optimizer)
    copy = keras.optimizers.deserialize(config)
    assert copy.sparse_aggregation == "sum"
    assert copy.dense_aggregation == "mean"
    assert copy.transform_gradients is None


CLIPPED = ({"clipnorm": 0.01}, {"global_clipnorm": 0.01})


def fit_clipped_in_double(scope, embedding):
    """Weights of float64 after a step, by each way to clip."""
    ids = np.arange(16).reshape(8, 2)
    weights = np.random.default_rng(0).normal(size=(16, DIM))
    options = {"kernel_initializer": "ones", "dtype": "float64"}
    found = []
    for clip in CLIPPED:
        inputs = keras.Input((2,), dtype="int32")
        rows = embedding(16, DIM, weights=weights, dtype="float64")(inputs)
        flat = keras.layers.Flatten(dtype="float64")(rows)
        model = keras.Model(inputs, keras.layers.Dense(1, **options)(flat))
        with scope():
            model.compile(keras.optimizers.SGD(1.0, **clip), "mse")
        model.fit(ids, ids[:, :1] / 4, 8, shuffle=False, verbose=0)
        found += model.get_weights()
    return found


def fit_clipped_in_double_distributed():
    scope = ks.HybridStrategy(architecture="ps").scope
    return fit_clipped_in_double(scope, ks.layers.ShardedEmbedding)


def test_norms_of_double_gradients_are_double(cluster):
    stock = contextlib.nullcontext, keras.layers.Embedding
    expected = fit_clipped_in_double(*stock)
    for found in cluster("native", 2).run(fit_clipped_in_double_distributed):
        for ours_, theirs in zip(found, expected, strict=True):
            assert theirs.dtype == "float64"
            np.testing.assert_allclose(ours_, theirs, 1e-13)


ACCUMULATED = None, 2


def nadams(scope, embedding, **options):
    """Nadam's product of momentums after training, with and without sums."""
    ids, targets = np.arange(8)[:, None], np.ones((8, DIM))
    found = []
    for steps in ACCUMULATED:
        rule = keras.optimizers.Nadam(gradient_accumulation_steps=steps)
        model = keras.Sequential(
            [
                keras.Input((1,), dtype="int32"),
                embedding(8, DIM, **options),
                keras.layers.Flatten(),
            ]
        )
        with scope():
            model.compile(rule, "mse")
        model.fit(ids, targets, 2, epochs=2, shuffle=False, verbose=0)
        found.append(float(rule._u_product.value))
    return found


def nadams_distributed():
    scope = ks.HybridStrategy(architecture="ps").scope
    return nadams(scope, ks.layers.ShardedEmbedding, num_partitions=1)


def test_ranks_without_rows_count_momentums(cluster):
    expected = nadams(contextlib.nullcontext, keras.layers.Embedding)
    assert len({1.0, *expected}) == 3
    for found in cluster("native", 2).run(nadams_distributed):
        np.testing.assert_allclose(found, expected, 1e-6)
