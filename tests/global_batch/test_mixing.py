"""Warnings of models and losses that mix the examples of a batch."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.global_batch import mixing
from tests.conftest import engines
from tests.logged import with_messages_of

DIM = 4


def scores_of(queries, items):
    return tf.matmul(queries, items, transpose_b=True)  # found here


def negatives(y_true, y_pred):
    """A contrastive loss of targets and outputs `(batch, DIM)`."""
    scores = scores_of(y_pred, y_true)
    return keras.losses.sparse_categorical_crossentropy(
        tf.range(tf.shape(scores)[0]), scores, from_logits=True
    )


class Retrieval(keras.Model):
    """Negatives are the other examples' items, gathered or not."""

    def __init__(self, gather=tf.identity):
        super().__init__()
        self.items = ks.layers.ShardedEmbedding(10, DIM)
        self.query = keras.layers.Dense(DIM)
        self.gather = gather

    def call(self, inputs):
        return self.query(tf.cast(inputs, "float32")), self.items(inputs[:, 0])

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        queries, items = map(self.gather, y_pred)
        scores = scores_of(queries, items)
        places = tf.range(tf.shape(scores)[0])
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)(
            places, scores
        )


class Ratings(keras.Model):
    """Products of users and movies; those of a batch become one number."""

    def __init__(self):
        super().__init__()
        self.users = ks.layers.ShardedEmbedding(10, DIM)
        self.movies = keras.layers.Embedding(10, DIM)

    def call(self, inputs):
        users, movies = self.users(inputs[:, 0]), self.movies(inputs[:, 1])
        dot = keras.ops.tensordot(users, movies, 2)
        return keras.ops.sigmoid(dot + users + movies)  # found here


class Clipped(keras.Model):
    """A step that clips gradients of rows, by the norm of all."""

    def __init__(self):
        super().__init__()
        self.rows = keras.layers.Embedding(10, DIM)

    def call(self, inputs):
        return keras.ops.mean(keras.ops.silu(self.rows(inputs)), axis=1)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        clipped = [tf.clip_by_norm(gradient, 1.0) for gradient in gradients]
        self.optimizer.apply(clipped, self.trainable_variables)
        return {"loss": loss}


class PerClass(keras.metrics.Metric):
    """Sums over the batch, one for each class; the ranks' are added up."""

    def __init__(self):
        super().__init__(name="per_class")
        self.sums = self.add_weight(shape=(DIM,), initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.sums.assign_add(tf.reduce_sum(y_true * y_pred, axis=0))

    def result(self):
        return tf.reduce_mean(self.sums)


def layers():
    """Layers of Keras that look at a batch as a whole, or at an example's."""
    inputs = keras.Input((4,), dtype="int32")
    rows = ks.layers.ShardedEmbedding(10, DIM)(inputs)
    rows = keras.layers.MultiHeadAttention(2, 2)(rows, rows)
    x = keras.layers.BatchNormalization()(keras.layers.Flatten()(rows))
    x = keras.layers.LayerNormalization()(keras.layers.Dropout(0.1)(x))
    x = keras.layers.Dense(
        DIM, kernel_regularizer="l2", activity_regularizer="l2"
    )(x)
    return keras.Model(inputs, x)


def plain(mix=lambda x: x):
    """A model that costs little to trace."""
    inputs = keras.Input((4,), dtype="int32")
    rows = ks.layers.ShardedEmbedding(10, DIM)(inputs)
    rows = keras.layers.Flatten()(rows)
    return keras.Model(inputs, mix(keras.layers.Dense(DIM)(rows)))


def softened(x):
    """Operations of a functional model."""
    weights = keras.ops.softmax(keras.ops.matmul(x, keras.ops.transpose(x)))
    return keras.ops.matmul(weights, x)


def models():
    """`(model, loss, metrics)` by name."""
    whole = ks.losses.GlobalMean(negatives, whole_batch=True)
    return {
        "loss": (plain(), negatives, None),
        "step": (Retrieval(), None, None),
        "product": (Ratings(), "mse", None),
        "clipped": (Clipped(), "mse", None),
        "operation": (plain(softened), "mse", None),
        "layers": (layers(), "mse", [PerClass(), "mae"]),
        "gathered": (Retrieval(ks.gather_batch), None, None),
        "whole": (plain(), whole, None),
        "dice": (plain(), keras.losses.Dice(), None),
    }


@with_messages_of("keras_sparsity.global_batch.mixing")
def warned(lines):
    """The warnings of each model."""
    strategy = ks.HybridStrategy(architecture="hybrid")
    x = np.random.default_rng(0).integers(0, 10, (12, 4))
    y = np.random.default_rng(1).random((12, DIM), dtype="float32")
    found = {}
    for name, (model, loss, metrics) in models().items():
        lines.clear()
        targets = None if isinstance(model, Retrieval) else y
        for _ in range(2 if name == "loss" else 1):
            with strategy.scope():
                model.compile("sgd", loss, metrics=metrics)
            model.fit(x, targets, batch_size=8, verbose=0)
        found[name] = list(lines)
    return found


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_the_line_that_mixes_is_named_once(cluster, engine):
    first, second = cluster(engine, 2).run(warned, timeout=200)
    assert not any(second.values())
    counts = {name: len(lines) for name, lines in first.items()}
    mixing = {"loss": 1, "step": 1, "product": 1, "operation": 1}
    assert counts == dict.fromkeys(counts, 0) | mixing, first
    for name in ("loss", "step", "product"):
        (line,) = first[name]
        assert "test_mixing.py:" in line and "# found here" in line
    assert "ks.gather_batch(x)" in line and "2 processes" in line
    assert "MatMul" in first["operation"][0]


def test_operations_without_a_place_in_python():
    op = types.SimpleNamespace(name="while/body", traceback=None)
    assert not mixing._is_left_out(op)
    assert mixing._place(op) is None
