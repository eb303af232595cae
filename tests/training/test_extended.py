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


def losses_of_runs():
    """Of a dataset that the strategy has distributed, before `fit` does."""
    keras.utils.set_random_seed(0)
    strategy = ks.HybridStrategy()
    x = np.random.default_rng(0).normal(size=(9, 3)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(4)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with strategy.scope():
        model.compile("sgd", "mse")
    parts = strategy.experimental_distribute_dataset(dataset)
    options = {"validation_data": parts, "shuffle": False, "verbose": 0}
    history = model.fit(parts, epochs=2, **options)
    outputs = model.predict(parts, verbose=0)
    return [*history.history.values(), outputs[:, 0]]


def test_runs_take_a_distributed_dataset_as_it_is(cluster):
    expected = losses_of_runs()
    for found in cluster("native", 2).run(losses_of_runs):
        for values, of_one in zip(found, expected, strict=True):
            np.testing.assert_allclose(values, of_one, 1e-5)


def draws_of_a_loop(run_eagerly):
    """Each step's draws, the layers' states, and draws outside of a step."""
    keras.utils.set_random_seed(3)
    strategy = ks.HybridStrategy()
    dropout = keras.layers.Dropout(0.5)
    model = keras.Sequential([keras.Input((64,)), dropout])
    sampler = ks.layers.SampledSoftmax(1000, 4).sampler

    def step():
        ones = tf.ones((1, 64))
        return {
            "layer": model(ones, training=True),
            "layer alone": dropout(ones, training=True),
            "keras": keras.random.normal((4,)),
            "tensorflow": tf.random.normal((4,)),
            "shared": sampler.sample()[0],
        }

    run = lambda: strategy.run(step)  # noqa: E731
    run = run if run_eagerly else tf.function(run)
    steps = [{k: v.numpy() for k, v in run().items()} for _ in range(2)]
    alike = [dropout.seed_generator.state, keras.random.normal((4,))]
    return steps, [np.array(each) for each in alike]


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_each_rank_of_a_loop_draws_its_own_numbers(cluster, run_eagerly):
    ranks = cluster("native", 2).run(draws_of_a_loop, run_eagerly)
    (ours, alike), (theirs, also_alike) = ranks
    for one, other in zip(alike, also_alike, strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one.pop("shared"), other.pop("shared"))
        for name in one:
            assert (one[name] != other[name]).any(), name
    for first, second in (ours, theirs):
        assert (first["layer"] != second["layer"]).any()


def statistics_of_a_loop(strategy=None):
    """Moving statistics and weights after two steps on uneven parts."""
    keras.utils.set_random_seed(3)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 10, 3)).astype("float32")
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.BatchNormalization(synchronized=strategy is not None),
            keras.layers.Dense(3),
        ]
    )
    loss_of, rule = keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1)
    steps = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    if strategy is not None:
        loss_of, rule = ks.losses.globalize(loss_of), ks.HybridOptimizer(rule)
        steps = strategy.experimental_distribute_dataset(steps)
    rule.build(model.trainable_variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        variables = model.trainable_variables
        rule.apply(tape.gradient(loss, variables), variables)

    for batch in steps:
        step(*batch) if strategy is None else strategy.run(step, args=batch)
    return model.get_weights()


def statistics_of_ranks():
    return statistics_of_a_loop(ks.HybridStrategy())


def test_synchronized_statistics_of_a_loop_are_those_of_one_process(cluster):
    expected = statistics_of_a_loop()
    for found in cluster("native", 2).run(statistics_of_ranks):
        for value, stock in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, stock, rtol=1e-5, atol=1e-6)


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


def with_an_optimizer_of_no_strategy():
    """The error of a step that builds and applies one."""

    class Model(keras.Sequential):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data))
            weights = self.trainable_variables
            gradients = tape.gradient(loss, weights)
            outside.apply_gradients(zip(gradients, weights, strict=True))
            return {"loss": loss}

    outside = keras.optimizers.SGD()
    model = Model([keras.Input((2,)), keras.layers.Dense(1)])
    with ks.HybridStrategy().scope():
        model.compile()
    return raised(lambda: model.fit(np.ones((4, 2)), verbose=0), ValueError)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_an_optimizer_of_no_strategy_is_refused(cluster, engine):
    for message in cluster(engine, 2).run(with_an_optimizer_of_no_strategy):
        assert "Wrap it: `ks.HybridOptimizer(optimizer)`" in message


@pytest.mark.parametrize("engine", engines())
def test_updates(cluster, engine):
    cluster(engine, 2).run(check_updates)
