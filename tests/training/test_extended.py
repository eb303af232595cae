"""The interface of a `tf.distribute.Strategy`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests.conftest import engines
from tests.test_strategy import raised

SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


def check_interface():
    strategy = ks.HybridStrategy()
    rank, size = strategy.rank, strategy.size
    assert strategy.num_replicas_in_sync == size == 2
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy
        variable = tf.Variable(3.0)
        assert tf.distribute.in_cross_replica_context()
    assert tf.distribute.get_strategy() is not strategy

    def replica(value):
        context = tf.distribute.get_replica_context()
        assert context.num_replicas_in_sync == size
        replica_id = context.replica_id_in_sync_group
        rows = tf.fill([rank + 1, 2], value)
        slices = tf.IndexedSlices(
            tf.ones([1, 2]) * value, tf.constant([rank]), tf.constant([3, 2])
        )
        with tf.GradientTape() as tape:
            tape.watch(value)
            square = context.all_reduce(SUM, value) ** 2
        return {
            "id": tf.identity(replica_id),
            "sum": context.all_reduce(SUM, {"a": value, "b": [rows[0]]}),
            "mean": context.all_reduce(MEAN, value),
            "rows": tf.convert_to_tensor(context.all_reduce(SUM, slices)),
            "gathered": context.all_gather(rows, axis=0),
            "columns": context.all_gather(tf.transpose(rows), axis=1),
            "nest": context.all_gather([rows, rows], axis=0)[1],
            "gradient": tape.gradient(square, value),
            "product": value * variable,
        }

    value = tf.constant(1.0 + rank)
    for run in (
        lambda: strategy.run(replica, args=(value,)),
        tf.function(lambda: strategy.run(replica, args=(value,))),
    ):
        result = tf.nest.map_structure(lambda x: x.numpy(), run())
        assert result["id"] == rank
        assert result["sum"]["a"] == 3.0
        np.testing.assert_array_equal(result["sum"]["b"][0], [3.0, 3.0])
        assert result["mean"] == 1.5
        np.testing.assert_array_equal(result["rows"], [[1, 1], [2, 2], [0, 0]])
        gathered = [[1, 1], [2, 2], [2, 2]]
        np.testing.assert_array_equal(result["gathered"], gathered)
        np.testing.assert_array_equal(result["nest"], gathered)
        np.testing.assert_array_equal(result["columns"], np.transpose(gathered))
        assert result["gradient"] == 2 * 2 * 3.0
        assert result["product"] == 3.0 * (1.0 + rank)

    def inside():
        tf.distribute.get_strategy().run(lambda: 1)

    message = raised(lambda: strategy.run(inside), RuntimeError)
    assert "cross-replica context" in message
    # Across replicas.
    part = tf.range(rank + 1, dtype=tf.float32)
    assert float(strategy.reduce(SUM, value, axis=None)) == 3.0
    assert float(strategy.reduce("MEAN", value, axis=None)) == 1.5
    assert float(strategy.reduce(SUM, part, axis=0)) == 1.0
    assert float(strategy.reduce(MEAN, part, axis=0)) == pytest.approx(1 / 3)
    np.testing.assert_array_equal(strategy.gather(part, axis=0), [0, 0, 1])
    assert strategy.experimental_local_results(value) == (value,)
    seen = strategy.experimental_distribute_values_from_function(
        lambda c: (c.replica_id_in_sync_group, c.num_replicas_in_sync)
    )
    assert seen == (rank, size)
    resolver = strategy.cluster_resolver
    assert (resolver.task_type, resolver.task_id) == ("worker", rank)
    assert resolver.cluster_spec().num_tasks("worker") == size
    # Datasets.
    dataset = tf.data.Dataset.range(6).batch(4)
    parts = strategy.experimental_distribute_dataset(dataset)
    assert [p.numpy().tolist() for p in parts] == (
        [[0, 1], [4]] if rank == 0 else [[2, 3], [5]]
    )

    def own_part(context):
        batch = context.get_per_replica_batch_size(4)
        shards = context.num_input_pipelines, context.input_pipeline_id
        return tf.data.Dataset.range(6).shard(*shards).batch(batch)

    parts = strategy.distribute_datasets_from_function(own_part)
    expected = [[rank, rank + 2], [rank + 4]]
    assert [p.numpy().tolist() for p in parts] == expected
    again = strategy.experimental_distribute_dataset(parts)
    assert [p.numpy().tolist() for p in again] == expected


@pytest.mark.parametrize("engine", engines())
def test_interface_of_tensorflow(cluster, engine):
    cluster(engine, 2).run(check_interface)


def check_updates():
    """Updates of a variable, in a step and across replicas."""
    strategy = ks.HybridStrategy()
    variable = tf.Variable(1.0)
    contexts = []

    def assign(var, value):
        contexts.append(tf.distribute.in_cross_replica_context())
        if value > 3.0:  # of a tensor: for AutoGraph
            value += 10.0
        return var.assign(value)

    def step(value):
        extended = tf.distribute.get_strategy().extended
        (result,) = extended.update(variable, assign, (value,), group=False)
        return result

    run = tf.function(lambda value: strategy.run(step, (value,)))
    assert float(run(tf.constant(2.0))) == float(variable) == 2.0
    assert float(run(tf.constant(4.0))) == float(variable) == 14.0
    assert contexts and not any(contexts)
    with strategy.scope():
        strategy.extended.update(
            variable, assign, kwargs={"value": tf.constant(3.0)}
        )
    assert float(variable) == 3.0
    assert contexts[-1]


def test_an_optimizer_of_another_strategy_is_refused():
    other, strategy = ks.HybridStrategy(), ks.HybridStrategy()
    with other.scope():
        optimizer = keras.optimizers.SGD()
        variable = keras.Variable(1.0)
    step = lambda: optimizer.apply([tf.constant(1.0)], [variable])  # noqa: E731
    message = raised(lambda: strategy.run(step), ValueError)
    assert "used an object of another strategy" in message
    assert float(variable) == 1.0


@pytest.mark.parametrize("engine", engines())
def test_updates(cluster, engine):
    cluster(engine, 2).run(check_updates)
