"""Recommenders as Keras's examples write them, against one process.

Subclassed models of ordinary embeddings, with a loss or a step of their own;
the strategy's lines are all that is added. Two of them compare each query with
the items of the whole batch, which every process sees a part of: `gather` makes
the batch whole.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests import oracles
from tests.conftest import engines
from tests.logged import with_messages_of

SIZES, DIM, BATCH = (40, 30, 7), 4, 8
# The last batch leaves a rank without examples.
EXAMPLES = 3 * BATCH + 1


class Towers(keras.Model):
    """Retrieval: a query's own item scores above those of other queries."""

    def __init__(self, gather):
        super().__init__()
        users, items, _ = SIZES
        self.query_tower = keras.Sequential(
            [keras.layers.Embedding(users, DIM), keras.layers.Dense(DIM)]
        )
        self.item_tower = keras.layers.Embedding(items, DIM)
        self.gather = gather

    def call(self, inputs):
        ids = inputs["ids"]
        return self.query_tower(ids[:, 0]), self.item_tower(ids[:, 1])

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        return self.in_batch(*y_pred[:2])

    def in_batch(self, queries, items):
        queries, items = self.gather(queries), self.gather(items)
        scores = 30 * keras.ops.matmul(queries, keras.ops.transpose(items))
        of_each = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return of_each(keras.ops.arange(keras.ops.shape(scores)[0]), scores)


class MultiTask(Towers):
    """The same rows tell ratings, too; both losses have a weight."""

    def __init__(self, gather):
        super().__init__(gather)
        self.rating = keras.Sequential(
            [keras.layers.Dense(6, "relu"), keras.layers.Dense(1)]
        )

    def call(self, inputs):
        query, item = super().call(inputs)
        rows = keras.ops.concatenate([query, item], axis=1)
        return query, item, self.rating(rows)

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        *rows, ratings = y_pred
        of_ratings = keras.losses.MeanSquaredError()(y, ratings)
        return 0.5 * of_ratings + 1.5 * self.in_batch(*rows)


class Interactions(keras.Model):
    """DLRM: the products of every two features of an example."""

    def __init__(self, gather):
        super().__init__()
        self.tables = [keras.layers.Embedding(n, DIM) for n in SIZES]
        self.bottom = keras.layers.Dense(DIM, "relu")
        self.top = keras.Sequential(
            [keras.layers.Dense(6, "relu"), keras.layers.Dense(1, "sigmoid")]
        )

    def call(self, inputs):
        ids, dense = inputs["ids"], self.bottom(inputs["numbers"])
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        features = keras.ops.stack([dense, *rows], axis=1)
        products = keras.ops.matmul(
            features, keras.ops.transpose(features, (0, 2, 1))
        )
        products = keras.ops.reshape(products, (-1, (1 + len(SIZES)) ** 2))
        return self.top(keras.ops.concatenate([dense, products], axis=1))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=outputs)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=tf.shape(y)[0])
        return {metric.name: metric.result() for metric in self.metrics}


class Crosses(keras.Model):
    """DCN: layers that multiply what comes in with the features."""

    def __init__(self, gather):
        super().__init__()
        self.tables = [keras.layers.Embedding(n, DIM) for n in SIZES]
        self.crosses = [keras.layers.Dense(DIM * len(SIZES)) for _ in range(2)]
        self.deep = keras.layers.Dense(6, "relu")
        self.out = keras.layers.Dense(1, "sigmoid")

    def call(self, inputs):
        rows = [
            table(inputs["ids"][:, i]) for i, table in enumerate(self.tables)
        ]
        features = x = keras.ops.concatenate(rows, axis=1)
        for cross in self.crosses:
            x = features * cross(x) + x
        return self.out(self.deep(x))


# And the strategies: rows of ordinary embeddings stay whole or are spread.
MODELS = {
    "retrieval": (Towers, "auto"),
    "multi-task": (MultiTask, "ps"),
    "dlrm": (Interactions, "ps"),
    "dcn": (Crosses, "auto"),
}
# Whose losses mix the examples of a batch.
MIXING = ("retrieval", "multi-task")


def examples():
    rng = np.random.default_rng(3)
    ids = [oracles.zipf_ids(rng, n, (EXAMPLES, 1)) for n in SIZES]
    ids = np.concatenate(ids, axis=1).astype("int32")
    numbers = rng.random((EXAMPLES, 3), dtype="float32")
    y = (ids.sum(axis=1, keepdims=True) % 5 > 1).astype("float32")
    return {"ids": ids, "numbers": numbers}, y


def fit(name, optimizer, gather):
    """Losses, and the weights before and after."""
    keras.utils.set_random_seed(4)
    model = MODELS[name][0](gather)
    x, y = examples()
    model({key: value[:2] for key, value in x.items()})
    model.compile(
        optimizer, None if name in MIXING else keras.losses.BinaryCrossentropy()
    )
    start = model.get_weights()
    history = model.fit(
        x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0
    )
    return history.history["loss"], start, model.get_weights()


def rule():
    return keras.optimizers.Adagrad(0.2)


@with_messages_of("keras_sparsity.global_batch.mixing")
def train(told, name):
    """The results on this rank, gathered and not, and what each has told."""
    results = []
    for gather in (ks.gather_batch, tf.identity)[: 1 + (name in MIXING)]:
        told.clear()
        strategy = ks.HybridStrategy(architecture=MODELS[name][1])
        with strategy.scope():
            results.append((fit(name, rule(), gather), list(told)))
    return results


def _places():
    """Of each model, the engine that `make test` takes."""
    for number, name in enumerate(MODELS):
        for engine in engines(usually=("native", "horovod")[number % 2]):
            yield pytest.param(*engine.values, name, marks=engine.marks)


@pytest.mark.parametrize(("engine", "name"), list(_places()))
def test_two_processes_train_as_one_does(cluster, engine, name):
    losses, start, end = fit(name, oracles.DenseGradients(rule()), tf.identity)
    ranks = cluster(engine, 2).run(train, name)
    for rank, results in enumerate(ranks):
        (found, _, weights), told = results[0]
        assert told == []
        np.testing.assert_allclose(found, losses, rtol=1e-4)
        assert max(oracles.relative_difference(start, end, weights)) < 1e-3
        for (apart, *_), told in results[1:]:
            assert abs(apart[0] - losses[0]) > 0.1 * losses[0]
            assert len(told) == (rank == 0)
            assert all("ks.gather_batch(x)" in line for line in told)
