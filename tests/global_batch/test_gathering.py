"""Losses of in-batch negatives over the global batch, against stock Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests.conftest import engines

ROWS, DIM, BATCH = 30, 4, 8
# The last batch has one example: a rank without examples.
EXAMPLES = 3 * BATCH + 1


class Retrieval(keras.Model):
    """Two towers, whose loss takes the other examples' items as negatives."""

    def __init__(self, embedding, gather):
        super().__init__()
        start = keras.initializers.RandomUniform(-1, 1, seed=1)
        self.items = embedding(ROWS, DIM, start)
        self.query = keras.layers.Dense(DIM, kernel_initializer=start)
        self.gather = gather
        self.loss_of = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        )

    def call(self, inputs):
        return self.query(inputs[:, 1:]), self.items(inputs[:, 0])

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        queries, items = map(self.gather, y_pred)
        scores = tf.matmul(queries, items, transpose_b=True)
        return self.loss_of(tf.range(tf.shape(scores)[0]), scores)


class OwnStep(keras.Model):
    """A step with the plain mean of the examples' losses."""

    def __init__(self, gather):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.gather = gather

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            losses = keras.ops.mean(keras.ops.square(self(data)), -1)
            loss = keras.ops.mean(self.gather(losses))
            size = self.distribute_strategy.num_replicas_in_sync
            share = loss / size
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(share, weights), weights)
        return {"loss": loss}


def fit(model):
    model.compile(keras.optimizers.SGD(0.5, momentum=0.5))
    random = np.random.default_rng(2)
    x = random.integers(ROWS, size=(EXAMPLES, 4)).astype("float32")
    x[:, 1:] /= ROWS
    history = model.fit(x, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    return [*history.history["loss"], *model.get_weights()]


def gradient_of_rows():
    """Gathered rows, their gradient, and this rank's rows."""
    rank = ks.collectives.current().rank
    rows = rank + 1.0 + np.arange(3 * (rank + 2), dtype="float32")
    rows = tf.constant(rows.reshape(-1, 3))
    with tf.GradientTape() as tape:
        tape.watch(rows)
        found = ks.gather_batch(rows)
        loss = (rank + 1.0) * tf.reduce_sum(tf.square(found))
    bools = ks.gather_batch(rows[:, 0] > 2)
    return found.numpy(), tape.gradient(loss, rows), rows.numpy(), bools.numpy()


def run():
    results = []
    for gather in (ks.gather_batch, tf.identity):
        with ks.HybridStrategy(architecture="hybrid").scope():
            model = Retrieval(ks.layers.ShardedEmbedding, gather)
            results.append(fit(model))
    with ks.HybridStrategy().scope():
        results.append(fit(OwnStep(ks.gather_batch)))
    return results, gradient_of_rows()


@pytest.fixture(scope="module")
def stock():
    return fit(Retrieval(keras.layers.Embedding, tf.identity))


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_in_batch_negatives_are_those_of_the_global_batch(
    engine, cluster, stock
):
    ranks = cluster(engine, 2).run(run)
    of_own_step = fit(OwnStep(tf.identity))
    for (found, apart, own), _ in ranks:
        for one, other in zip(own, of_own_step, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        for one, other in zip(found, stock, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
        assert abs(apart[0] - stock[0]) > 0.1 * stock[0]
    rows = np.concatenate([own for _, (_, _, own, _) in ranks])
    for _, (found, gradient, own, bools) in ranks:
        np.testing.assert_array_equal(found, rows)
        np.testing.assert_array_equal(bools, rows[:, 0] > 2)
        # Rank 0 weighs the squares by 1, rank 1 by 2.
        np.testing.assert_allclose(gradient, (1 + 2) * 2 * own, rtol=1e-6)


def test_one_process_has_all_rows(stock):
    found = fit(Retrieval(ks.layers.ShardedEmbedding, ks.gather_batch))
    for one, other in zip(found, stock, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
