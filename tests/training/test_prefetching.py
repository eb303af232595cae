"""What is said of options that do nothing: once, on one of all ranks."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.data import sharding
from tests.conftest import engines
from tests.logged import with_messages_of


def model_of(computed=False):
    inputs = keras.Input((2,), dtype="int32")
    # The ids of a lambda are not known before the model is called.
    ids = keras.layers.Lambda(lambda x: x + 1)(inputs) if computed else inputs
    rows = ks.layers.ShardedEmbedding(4_000, 16)(ids)
    return keras.Model(inputs, keras.layers.Dense(1)(rows))


def dense():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def custom_loop(x):
    """Two steps by one strategy."""
    strategy = ks.HybridStrategy(architecture="hybrid", prefetch=True)
    table = ks.layers.ShardedEmbedding(4_000, 16)
    table.build()
    optimizer = ks.HybridOptimizer(keras.optimizers.Adagrad(0.1))

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table(ids))
        variables = table.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    for _ in range(2):
        strategy.run(step, args=(tf.constant(x),))


@with_messages_of("keras_sparsity")
def said(lines):
    """The lines of each training, by name; one is trained twice."""
    x = np.arange(16).reshape(8, 2)
    y = np.ones((8, 1), "float32")

    def generator():
        for _ in range(2):
            yield x, y

    found = {}

    def fit(name, model, data=(x, y), optimizer="adagrad", **options):
        lines.clear()
        options = {"architecture": "hybrid", "prefetch": True} | options
        strategy = ks.HybridStrategy(**options)
        with strategy.scope():
            model.compile(optimizer, "mse")
        for _ in range(2 if name == "no table" else 1):
            if callable(data):
                model.fit(data(), steps_per_epoch=1, verbose=0)
            else:
                model.fit(*data, batch_size=8, verbose=0)
        found[name] = list(lines)

    fit("prefetched", model_of())
    fit("not asked for", dense(), prefetch=False)
    fit("generator", model_of(), generator)
    fit("row by row", model_of(), architecture="naive_ps")
    fit("no table", dense())
    # Without a closed form of untouched rows.
    adam = keras.optimizers.Adam(beta_1=0.9, beta_2=0.9)
    fit("all rows", model_of(), optimizer=adam)
    fit("computed", model_of(computed=True))

    model = model_of()
    with ks.HybridStrategy(architecture="hybrid", prefetch=True).scope():
        model.compile("adagrad", "mse", run_eagerly=True)
    lines.clear()
    for _ in range(2):
        model.train_on_batch(x, y)
        model.test_on_batch(x, y)
    found["single batches"] = list(lines)
    lines.clear()
    custom_loop(x)
    found["custom loop"] = list(lines)

    communicator = ks.collectives.current()
    lines.clear()
    sharding._told.clear()
    batches = tf.data.Dataset.range(8).batch(4)
    for _ in range(2):  # as in each of two epochs
        ks.data.shard(batches.shuffle(2), communicator)
    found["shard"] = list(lines)
    lines.clear()
    with mock.patch.object(communicator, "machines", (0, 0, 1)):
        for local_aggregation in (False, True, True):
            ks.HybridStrategy(local_aggregation=local_aggregation)
    found["machines"] = list(lines)
    lines.clear()
    ks.data.shard(batches.shuffle(2), communicator, by="batches")
    mapped = tf.data.Dataset.range(8).map(lambda x: x + 1).batch(4)
    ks.data.shard(mapped, communicator)
    found["shard early"] = list(lines)
    return found


_REASONS = {
    "generator": "made by Python",
    "row by row": 'architecture="naive_ps" pulls row by row',
    "no table": "no table that is spread",
    "all rows": "updates all rows",
    "computed": "no table's ids are inputs",
    "single batches": "`train_on_batch` does not know the next batch",
    "custom loop": "`strategy.run` does not know the next batch",
}


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_what_does_nothing_says_why_once(cluster, engine):
    first, second = cluster(engine, 2).run(said, timeout=200)
    assert not any(second.values())
    for name in ("prefetched", "not asked for", "shard early"):
        assert first.pop(name) == [], name
    (late,) = first.pop("shard")
    assert "splits this dataset late" in late
    assert "after batching it does more" in late
    (uneven,) = first.pop("machines")
    assert "`local_aggregation` has no effect" in uneven
    assert "they have 2, 1." in uneven
    # Another line is that of an optimizer without a closed form.
    lines = {
        name: [line for line in found if "prefetch" in line]
        for name, found in first.items()
    }
    assert lines.keys() == _REASONS.keys()
    for name, reason in _REASONS.items():
        (line,) = lines[name]
        assert "`prefetch=True` has no effect" in line and reason in line
