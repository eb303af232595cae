"""Tables in functions of `tf.vectorized_map`, against stock Keras."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests.conftest import engines

ROWS, DIM = 20, 4


class Mapped(keras.Model):
    """Lookups in a map, of which one depends on rows; and a map in a map."""

    def __init__(self, embedding, is_in_branch=False):
        super().__init__()
        weights = np.random.default_rng(1).normal(size=(ROWS, DIM))
        self.embedding = embedding(ROWS, DIM, weights=weights)
        self.out = keras.layers.Dense(1, kernel_initializer="ones")
        self.is_in_branch = is_in_branch

    def call(self, batch):
        function = self.branch if self.is_in_branch else self.of_example
        return self.out(keras.ops.vectorized_map(function, batch))

    def of_example(self, ids):
        first = self.embedding(ids)
        largest = tf.cast(tf.argmax(first, axis=-1), tf.int32)
        second = self.embedding((ids + largest) % ROWS)
        inner = tf.vectorized_map(self.of_id, ids)
        return tf.reduce_mean(first * second + inner, axis=0)

    def of_id(self, one):
        return self.embedding(one // 2) * tf.cast(one, tf.float32)

    def branch(self, ids):
        return tf.cond(
            ids[0] > 3,
            lambda: self.embedding(ids),
            lambda: self.embedding(ids // 2),
        )


def fitted(scope, embedding, run_eagerly):
    """Logs, outputs and weights of batches of several lengths."""
    model = Mapped(embedding)
    with scope():
        model.compile(
            keras.optimizers.SGD(0.01), "mse", run_eagerly=run_eagerly
        )
    logs = []
    for length in (3, 5):
        rng = np.random.default_rng(length)
        ids = rng.integers(0, ROWS, (7, length)).astype("int32")
        labels = ids.mean(1, dtype="float32", keepdims=True)
        options = {"batch_size": 4, "shuffle": False, "verbose": 0}
        logs += model.fit(ids, labels, **options).history["loss"]
    table = getattr(model.embedding, "table", None)
    rows = model.embedding.get_weights()[0] if table is None else table.read()
    return [logs, model.predict(ids, verbose=0), rows, *model.out.get_weights()]


def fitted_distributed(run_eagerly):
    scope = ks.HybridStrategy(architecture="ps").scope
    return fitted(scope, ks.layers.ShardedEmbedding, run_eagerly)


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_lookups_in_a_map(cluster, engine, run_eagerly):
    arguments = contextlib.nullcontext, keras.layers.Embedding, run_eagerly
    expected = fitted(*arguments)
    for found in cluster(engine, 3).run(fitted_distributed, run_eagerly):
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, 1e-4, 1e-6)


def in_a_branch():
    model = Mapped(ks.layers.ShardedEmbedding, is_in_branch=True)
    with ks.HybridStrategy(architecture="ps").scope():
        model.compile("sgd", "mse")
    try:
        model.fit(np.ones((4, 3), "int32"), np.ones((4, 1)), verbose=0)
    except ValueError as error:
        return str(error)


def test_a_branch_in_a_map_is_refused(cluster):
    for message in cluster("native", 3).run(in_a_branch):
        assert "is looked up in a loop, a branch" in message
        assert "or use `tf.map_fn`" in message
