"""The plan of a model, measured without training it, and while it trains."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.board import model_plan
from tests.conftest import engines

ROWS, DIM = 5_000, 8
BATCH, LENGTH, BATCHES = 24, 5, 3
SAMPLED, CLASSES = 6, 200


def ids():
    random = np.random.default_rng(5)
    return random.zipf(1.3, size=(BATCHES * BATCH, LENGTH)) % ROWS


def dataset():
    labels = np.random.default_rng(6).integers(CLASSES, size=len(ids()))
    return tf.data.Dataset.from_tensor_slices((ids(), labels)).batch(BATCH)


def new_model():
    """With tables of both kinds, an ordinary embedding, and state."""
    words = keras.Input((LENGTH,), dtype="int64")
    sharded = ks.layers.ShardedEmbedding(ROWS, DIM, name="sharded")(words)
    stock = keras.layers.Embedding(ROWS, DIM, name="stock")(words)
    hidden = keras.layers.Concatenate()([sharded, stock])
    hidden = keras.layers.Flatten()(hidden)
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.5, seed=3)(hidden)
    out = keras.layers.Dense(CLASSES, name="out")(hidden)
    model = keras.Model(words, out)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    return model


def expected_alpha(size):
    """Of the ids' tables: the mean over the workers' parts of all batches."""
    return np.mean(
        [
            len(np.unique(part)) / ROWS
            for batch in np.split(ids(), BATCHES)
            for part in np.split(batch, size)
        ]
    )


def facts(plan):
    return {
        v.sparsity.name.split("/")[0]: (v.sparsity.alpha, v.architecture)
        for v in plan.variables
    }


def test_plan_for_other_clusters_without_training(capsys):
    model = new_model()
    before = [keras.ops.convert_to_numpy(v) for v in model.variables]
    for cluster in (ks.planning.Cluster(4), ks.planning.Cluster(2, 2)):
        plan = ks.plan(model, dataset(), cluster, num_batches=BATCHES)
        alpha = expected_alpha(4)
        assert facts(plan)["sharded"] == (pytest.approx(alpha), "ps")
        assert facts(plan)["stock"] == (pytest.approx(alpha), "ps")
        assert facts(plan)["out"] == (None, "allreduce")
        sharded = next(
            v for v in plan.variables if v.sparsity.name.startswith("sharded")
        )
        # One process does not know the rows that two touch together.
        spec = ks.planning.VariableSpec("s", (ROWS, DIM), alpha)
        choice = ks.planning.plan([spec], cluster, engine="native").choices[0]
        assert sharded.costs == choice.costs
        printed = capsys.readouterr().out
        assert "alpha of the model" in printed
        assert printed.count("sharded") == 1
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(variable), value
        )
    assert all(not np.any(v.numpy()) for v in model.metrics_variables)
    # Nothing of it is taken for what training touches.
    assert all(v.alpha is None for v in ks.sparsity.measured(model))


@pytest.mark.parametrize("scope", [contextlib.nullcontext, None])
def test_of_a_model_that_is_not_built(scope):
    model = keras.Sequential(
        [
            ks.layers.ShardedEmbedding(ROWS, DIM, name="sharded"),
            keras.layers.Flatten(),
            keras.layers.Dense(1, name="out"),
        ]
    )
    with scope() if scope else ks.HybridStrategy().scope():
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((np.ones((4, 2)), np.ones((4, 1))))
    plan = ks.plan(model, data, ks.planning.Cluster(2))
    table, *others = [v.sparsity.alpha for v in plan.variables]
    assert table == pytest.approx(1 / ROWS) and others == [None, None]


def test_a_layer_tells_its_number_of_partitions():
    words = keras.Input((LENGTH,), dtype="int64")
    x = ks.layers.ShardedEmbedding(ROWS, DIM, num_partitions=2, name="t")(words)
    model = keras.Model(words, keras.layers.Dense(1, name="out")(x))
    model.compile("sgd", "mse")
    data = dataset().map(lambda ids, _: (ids, tf.zeros([tf.shape(ids)[0], 1])))
    cluster = ks.planning.Cluster(4, megabits_per_second=100.0)
    plan = ks.plan(model, data, cluster, num_batches=BATCHES)
    table = plan.variables[0]
    assert table.num_partitions == 2
    spec = ks.planning.VariableSpec(
        "t", (ROWS, DIM), expected_alpha(4), num_partitions=2
    )
    cost = ks.planning.engine_bytes(spec, "ps", cluster, "native")
    assert table.costs["ps"].busiest_bytes == pytest.approx(cost.busiest_bytes)
    # Weights, gradients: two of four processes have half of the table each.
    ways = {cost.way: cost for cost in plan.strategies if cost.num_tails < 2}
    outputs = 4 * (BATCH // 4) * LENGTH * (DIM + 1)
    assert ways["data parallelism"].memory_bytes == (
        2 * 4 * (ROWS * DIM / 2 + DIM + 1) + outputs,
    )


def test_without_a_variable_to_train_it_is_refused():
    model = new_model()
    model.trainable = False
    with pytest.raises(ValueError, match="a model with variables to train"):
        ks.plan(model, dataset(), ks.planning.Cluster(2))


def test_without_a_loss_it_is_refused():
    compiled = new_model()
    model = keras.Model(compiled.inputs, compiled.outputs)
    model.compile("sgd")
    with pytest.raises(ValueError, match="loss of `compile`.*a Functional"):
        ks.plan(model, dataset(), ks.planning.Cluster(2))


def test_the_table_lists_what_matters():
    model = keras.Sequential([keras.Input((4,))])
    for _ in range(8):
        model.add(keras.layers.Dense(4))
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((np.ones((4, 4)), np.ones((4, 4))))
    plan = ks.plan(model, data, ks.planning.Cluster(2))
    lines = plan.markdown().splitlines()
    assert len(lines) == 2 + 10 + 1 + 2
    assert "| 6 smaller dense variables |" in lines[12]
    assert plan.alpha_model == 1
    total = 2 * 4 * 8 * (16 + 4) / 2 * 2
    assert plan.bytes_of("allreduce") == total


def plan_and_train():
    strategy = ks.HybridStrategy()
    model = new_model()
    with strategy.scope():
        model.compile("adam", model.loss)
    # The last batch has no example for one of the processes.
    plus_one = dataset().concatenate(dataset().unbatch().take(1).batch(1))
    planned = ks.plan(model, plus_one, num_batches=BATCHES + 1)
    with pytest.raises(ValueError, match="an example for each process"):
        ks.plan(model, dataset().unbatch().batch(1))
    model.fit(dataset(), verbose=0)
    running = model_plan.of_running(model)
    rows = [v.costs["allreduce"].busiest_bytes for v in running.variables]
    balance = {
        v.sparsity.name.split("/")[0]: v.owner_balance
        for v in running.variables
    }
    return facts(planned), facts(running), sum(rows), balance


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_plan_of_running_processes(engine, cluster, capfd):
    results = cluster(engine, 2).run(plan_and_train)
    assert results[0] == results[1]
    planned, running, num_bytes, balance = results[0]
    alpha = expected_alpha(2)
    assert planned["sharded"] == (pytest.approx(alpha), "ps")
    assert planned["out"] == (None, "allreduce")
    # What an ordinary layer has, whatever would be better.
    assert running["stock"] == (pytest.approx(alpha), "allgather")
    assert running["sharded"] == (pytest.approx(alpha), "ps")
    elements = sum(v.shape.num_elements() for v in _trainable())
    assert num_bytes == pytest.approx(2 * elements * 4)
    assert 1 <= balance["sharded"] < 2
    assert balance["stock"] is None


def _trainable():
    return [v.value for v in new_model().trainable_variables]
