"""What adopted models read and log: as stock Keras in one process."""

import contextlib
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity import metrics
from tests.conftest import engines

pytestmark = pytest.mark.smoke

NUM_BATCHES = 7
READ_ONCE = {"shuffle": False, "steps_per_epoch": NUM_BATCHES, "verbose": 0}


def batches():
    """A generator that can be read once; its last batch is a short one."""
    rng = np.random.default_rng(5)
    for index in range(NUM_BATCHES):
        rows = 3 if index == NUM_BATCHES - 1 else 6
        x = rng.normal(size=(rows, 2)).astype("float32")
        yield x, x[:, :1] * 2 + 1


def model():
    keras.utils.set_random_seed(2)
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def fit_generator():
    distributed = model()
    with ks.HybridStrategy().scope():
        distributed.compile("sgd", "mse", metrics=["mae"])
    history = distributed.fit(batches(), **READ_ONCE).history
    return distributed.get_weights(), history


def orders_of_epochs():
    """The labels of each step, over epochs, of shuffled arrays."""
    # As at the start of a script that sets no seed.
    tf.random.set_seed(ks.collectives.agreed_seed())
    x = np.arange(32, dtype="float32").reshape(32, 1)
    seen = []

    class Noting(keras.Sequential):
        def train_step(self, data):
            seen.append(data[0].numpy().ravel().tolist())
            return super().train_step(data)

    noting = Noting([keras.Input((1,)), keras.layers.Dense(1)])
    with ks.HybridStrategy().scope():
        noting.compile("sgd", "mse", run_eagerly=True)
    noting.fit(x, x, batch_size=32, epochs=3, verbose=0)
    return seen


@pytest.mark.parametrize("engine", engines())
def test_a_generator_is_read_once_and_whole(cluster, engine):
    stock = model()
    stock.compile("sgd", "mse", metrics=["mae"])
    expected = stock.fit(batches(), **READ_ONCE).history
    for weights, history in cluster(engine, 2).run(fit_generator):
        for ours, theirs in zip(weights, stock.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5)


def test_arrays_are_shuffled_alike_and_anew_in_each_epoch(cluster):
    first, second = cluster("native", 2).run(orders_of_epochs)
    assert len(first) == len(second) == 3
    for ours, theirs in zip(first, second, strict=True):
        assert sorted(ours + theirs) == list(range(32))
    assert first[0] != first[1] != first[2]


class Sides(keras.Model):
    """Ten times the first input, and the second, of any structure."""

    def __init__(self):
        super().__init__()
        self.scale = keras.layers.Dense(1, use_bias=False)

    def call(self, inputs):
        first, *others = keras.tree.flatten(inputs)
        self.add_loss(keras.ops.mean(keras.ops.square(self.scale(first))))
        return sum((10 * keras.ops.sum(x, 1) for x in others), first[:, 0])


def structures():
    """Inputs without labels, in each structure that Keras takes."""
    a = np.arange(7, dtype="float32").reshape(7, 1)
    b = a + 100
    return {
        "list": [a, b],
        "list of one": [a],
        "dict of one": {"a": a},
        "nested": {"a": [a, b], "c": (b,)},
    }


def without_labels(strategy=None):
    """What a model gives for inputs alone, in each way of giving them."""
    results = {}
    scope = strategy.scope if strategy else contextlib.nullcontext
    size = strategy.size if strategy else 1
    for kind, x in structures().items():
        sides = Sides()
        sides.scale.kernel_initializer = keras.initializers.Constant(0.5)
        with scope():
            sides.compile(keras.optimizers.SGD(0.01))
        # A dataset has no lists, and takes a tuple for labels and weights.
        of_tuples = keras.tree.lists_to_tuples(x)
        dataset = tf.data.Dataset.from_tensor_slices((of_tuples,)).batch(4)
        whole_batches = dataset.take(1)
        if size > 1:
            whole_batches = strategy.shard(whole_batches)
        options = {"verbose": 0}
        results[kind] = [
            sides.predict(x, batch_size=4, **options),
            sides.predict(dataset, **options),
            sides.predict(whole_batches, **options),
            sides.predict_on_batch(x),
            sides.evaluate(x, batch_size=4, **options),
            sides.evaluate(dataset, **options),
            sides.fit(
                x, batch_size=4, shuffle=False, epochs=2, **options
            ).history["loss"],
            sides.fit(dataset, shuffle=False, **options).history["loss"],
            sides.train_on_batch(x),
            sides.test_on_batch(x),
            sides.get_weights()[0],
        ]
    return results


def without_labels_on_ranks():
    return without_labels(ks.HybridStrategy(prefetch=True))


@pytest.mark.parametrize("engine", engines())
def test_inputs_without_labels_keep_their_structure(cluster, engine):
    expected = without_labels()
    for found in cluster(engine, 2).run(without_labels_on_ranks):
        for kind, values in expected.items():
            for index, value in enumerate(values):
                np.testing.assert_allclose(
                    found[kind][index], value, 1e-5, err_msg=f"{kind} {index}"
                )


def two_outputs():
    """Losses of two outputs; the last batch has one example."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    outputs = {n: keras.layers.Dense(1, name=n)(inputs) for n in ("a", "b")}
    model = keras.Model(inputs, outputs)
    strategy = ks.HybridStrategy()
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), {"a": "mse", "b": "mae"})
    x = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
    labels = {"a": x[:, :1], "b": x[:, 1:2]}
    options = {"batch_size": 6, "shuffle": False, "verbose": 0}
    return model.fit(x, labels, epochs=2, **options).history


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_losses_of_outputs_count_each_batch_alike(cluster, engine):
    expected = two_outputs()
    assert set(expected) == {"a_loss", "b_loss", "loss"}
    for found in cluster(engine, 3).run(two_outputs):
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, 1e-5, err_msg=name)


def predictions_of_sharded():
    """What `predict` gives for a dataset that is split by elements."""
    strategy = ks.HybridStrategy()
    model = keras.Sequential([keras.layers.Identity()])
    with strategy.scope():
        model.compile()
    dataset = tf.data.Dataset.range(11).map(lambda i: i[None]).batch(6)
    shard = strategy.shard(dataset)
    read = next(iter(shard)).numpy().ravel().tolist()
    with pytest.raises(ValueError, match="without `strategy.shard`"):
        model.predict(shard.map(lambda x: x), verbose=0)
    return read, model.predict(shard, verbose=0)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_predictions_are_in_the_order_of_the_dataset(cluster, engine):
    found = cluster(engine, 3).run(predictions_of_sharded)
    for rank, (read, outputs) in enumerate(found):
        assert read == [rank, rank + 3]  # else it would not be reordered
        np.testing.assert_array_equal(outputs.ravel(), np.arange(11))


# Logs of steps of the user's own.

# Made by no model and in no scope, as in older guides of Keras.
RECALL = "recall of nobody"


class Half(keras.metrics.Metric):
    """Computed from another metric, which it does not keep as its own."""

    def __init__(self, other):
        super().__init__(name="half")
        self.__dict__["other"] = other

    def update_state(self, *args, **kwargs):
        pass

    def result(self):
        return self.__dict__["other"].result() / 2


class Classifier(keras.Model):
    def __init__(self, recall):
        super().__init__()
        start = keras.initializers.GlorotUniform(seed=3)
        self.out = keras.layers.Dense(1, "sigmoid", kernel_initializer=start)
        self.curve = keras.metrics.AUC(name="curve")
        self.mean = keras.metrics.Mean(name="mean")
        self.late = keras.metrics.Mean(name="late")
        self.__dict__["recall"] = recall

    def call(self, x):
        return self.out(x)


class OwnLogs(Classifier):
    """Logs of all forms."""

    def __init__(self, recall):
        super().__init__(recall)
        self.half = Half(self.curve)

    @property
    def metrics(self):
        return [*super().metrics, self.__dict__["recall"]]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=outputs)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.logs(y, outputs)

    def test_step(self, data):
        return self.logs(data[1], self(data[0], training=False))

    def logs(self, y, outputs):
        before = self.late.result()
        for metric in (self.curve, self.__dict__["recall"]):
            metric.update_state(y, outputs)
        for metric in self.metrics:
            if metric.name == "compile_metrics":
                metric.update_state(y, outputs)
        self.mean.update_state(outputs)
        logs = {
            "loss": self.curve.result(),
            "mean": self.curve.result(),  # the name of another metric
            "before": before,
            "nested": {
                "half": self.half.result(),
                "mean": {"of mean": self.mean.result()},
            },
            "expression": tf.sqrt(self.mean.result()) + self.curve.result(),
            "number": 7,
            "rate": self.optimizer.learning_rate,
        }
        self.late.update_state(outputs)
        logs["late"] = keras.ops.square(self.late.result())
        self.late.total.assign_add(tf.reduce_sum(outputs))
        logs["later"] = self.late.result()
        listed = {m.name: m.result() for m in self.metrics}
        return {**listed, **logs}


class OwnRuns(Classifier):
    """Methods of Keras's names with arguments of their own."""

    def fit(self, inputs):
        return super().fit(
            *inputs, batch_size=8, epochs=2, shuffle=False, verbose=0
        )

    def evaluate(self, inputs):
        return super().evaluate(
            *inputs, batch_size=8, verbose=0, return_dict=True
        )

    def predict(self, x):
        return super().predict(x * 0.5, verbose=0)

    def train_on_batch(self, inputs):
        return super().train_on_batch(*inputs, return_dict=True)

    def predict_on_batch(self, inputs):
        return self(inputs) * 2  # nothing of Keras's


def classified():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(22, 3)).astype("float32")
    return x, rng.integers(0, 2, (22, 1)).astype("float32")


def own_logs(scope, **options):
    """History and evaluation of `OwnLogs`, flat."""
    x, y = classified()
    made = OwnLogs(keras.metrics.Recall(name=RECALL))
    with scope():
        made.compile(
            "adam", "binary_crossentropy", metrics=["accuracy"], **options
        )
    arguments = {"batch_size": 8, "verbose": 0}
    history = made.fit(x, y, shuffle=False, epochs=2, **arguments).history
    evaluated = made.evaluate(x, y, return_dict=True, **arguments)
    return {**history, **{f"test_{k}": v for k, v in evaluated.items()}}


def own_runs(scope):
    x, y = classified()
    made = OwnRuns(keras.metrics.Recall(name=RECALL))
    with scope():
        made.compile("adam", "mse", metrics=["mae"])
    return {
        **made.fit((x, y)).history,
        **{f"test_{k}": v for k, v in made.evaluate((x, y)).items()},
        "outputs": made.predict(x),
        **{f"batch_{k}": v for k, v in made.train_on_batch((x, y)).items()},
        "plain": np.array(made.predict_on_batch(x)),
        "weights": np.concatenate([w.ravel() for w in made.get_weights()]),
    }


EAGER = {"run_eagerly": True}
IN_TWOS = {"steps_per_execution": 2}


def all_own(scope):
    return [
        own_logs(scope),
        own_logs(scope, **EAGER),
        own_logs(scope, **IN_TWOS),
        own_runs(scope),
    ]


def all_own_distributed():
    return all_own(ks.HybridStrategy().scope)


def check_all_own(found):
    expected = all_own(contextlib.nullcontext)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            np.testing.assert_allclose(
                ours[name], values, rtol=1e-4, err_msg=name
            )


@pytest.mark.parametrize("engine", engines())
def test_own_steps_log_and_own_runs_run_as_in_one_process(cluster, engine):
    for found in cluster(engine, 2).run(all_own_distributed):
        check_all_own(found)


def test_own_steps_and_own_runs_in_one_process():
    check_all_own(all_own_distributed())


def messages_of_a_step():
    """How often a stock step's trace sums metrics."""
    counts = []
    made = Classifier(None)
    with ks.HybridStrategy().scope():
        made.compile("sgd", "mse", metrics=["mae", "mse"])
    stock = metrics._reduced

    def counted(variables, ranks):
        counts.append(tf.executing_eagerly())
        return stock(variables, ranks)

    x, y = classified()
    with mock.patch.object(metrics, "_reduced", counted):
        made.train_on_batch(x[:8], y[:8])
    return counts


def test_metrics_of_a_stock_step_are_one_message(cluster):
    for counts in cluster("native", 2).run(messages_of_a_step):
        assert counts == [False]


# Weights that a rank changes by itself.


def weighted(optimizer="adam"):
    """A table, noise and a dense layer, compiled; and a `fit` of it."""
    keras.utils.set_random_seed(4)
    x, y = np.arange(16).reshape(8, 2) % 10, np.ones((8, 1), "float32")
    weighted = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            ks.layers.ShardedEmbedding(10, 3, name="table"),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1, name="dense"),
        ]
    )
    strategy = ks.HybridStrategy(architecture="hybrid")
    with strategy.scope():
        weighted.compile(optimizer, "mse")

    def fit():
        weighted.fit(x, y, batch_size=4, verbose=0)

    return weighted, fit, (x, y), strategy.rank


def set_before_training(path):
    """Messages, and what of 5s every rank has after it has set them."""
    keras.utils.clear_session()
    model, fit, (x, _), rank = weighted(keras.optimizers.SGD(0.0))
    fives = [np.full(v.shape, 5.0) for v in model.weights]
    model.save_weights(path)
    messages = []

    def refused(call, change, *ranks):
        if rank in ranks:
            change()
        with pytest.raises(ValueError) as error:
            call()
        messages.append(str(error.value))
        model.set_weights(fives)

    table = model.get_layer("table")

    def set_fours():
        table.embeddings.assign(fives[0] - 1)

    refused(fit, lambda: model.set_weights(fives), 0)
    refused(lambda: model.predict(x, verbose=0), set_fours, 0)
    refused(lambda: model.train_on_batch(x, x[:, :1]), set_fours, 1)
    refused(fit, lambda: model.load_weights(path), 0)
    refused(fit, lambda: model.set_weights([w * rank for w in fives]), 0, 1)
    refused(lambda: model.save_weights(path), set_fours, 1)
    fit()
    weights = [table.table.read(), model.get_layer("dense").get_weights()[0]]
    return messages, weights


def change_between_runs(path):
    """Messages of each change, and every rank's dense weights at the end."""
    keras.utils.clear_session()
    model, fit, (x, y), rank = weighted()
    dense = model.get_layer("dense")
    fit()
    fit()  # with the ranks' own dropout
    model.save_weights(path)
    messages = {}

    def refused(name, call, change, *ranks):
        kept = [v.numpy() for v in model.optimizer.inner_optimizer.variables]
        if rank in ranks:
            change()
        with pytest.raises(ValueError) as error:
            call()
        messages[name] = str(error.value)
        model.load_weights(path)
        variables = model.optimizer.inner_optimizer.variables
        for variable, value in zip(variables, kept, strict=True):
            variable.assign(value)
        fit()

    def slot():
        for variable in model.optimizer.inner_optimizer.variables:
            if "dense" in variable.path and "bias" in variable.path:
                variable.assign(variable + 1.0)

    refused("fit", fit, lambda: dense.kernel.assign(dense.kernel + 1.0), 1)
    refused(
        "predict",
        lambda: model.predict(x, verbose=0),
        lambda: dense.kernel.assign(dense.kernel[::-1]),
        0,
    )
    dense.trainable = False
    refused(
        "evaluate",
        lambda: model.evaluate(x, y, verbose=0),
        lambda: dense.bias.assign([np.nan]),
        1,
    )
    dense.trainable = True
    refused("slot", fit, slot, 1)
    refused("load_weights", fit, lambda: model.load_weights(path), 1)
    # Other processors round in another way.
    if rank == 1:
        dense.kernel.assign(dense.kernel * (1 + 1e-6))
    fit()
    return messages, dense.get_weights()


@pytest.mark.parametrize("engine", engines())
def test_weights_that_one_rank_sets_are_refused(cluster, engine, tmp_path):
    path = tmp_path / "of_both.weights.h5"
    results = cluster(engine, 2).run(set_before_training, str(path))
    for messages, weights in results:
        assert len(messages) == 6
        for message in messages:
            assert "on every rank" in message and "table" in message
        assert "table/embeddings: values were set on rank 0\n" in messages[0]
        for values in weights:
            np.testing.assert_array_equal(values, 5.0)


@pytest.mark.parametrize("engine", engines())
def test_replicas_that_one_rank_changed_are_seen(cluster, engine, tmp_path):
    path = tmp_path / "between.weights.h5"
    first, second = cluster(engine, 2).run(change_between_runs, str(path))
    for messages, weights in (first, second):
        assert "dense/kernel: rank 1" in messages["fit"]
        assert "dense/kernel: rank 1" in messages["predict"]
        assert "dense/bias: rank 1" in messages["evaluate"]
        assert "bias" in messages["slot"]
        assert "values were set on rank 1" in messages["load_weights"]
        for ours, theirs in zip(weights, first[1], strict=True):
            np.testing.assert_array_equal(ours, theirs)


# XLA.


def compile_with_xla():
    """The errors of all ways to ask for it; then training without."""
    strategy = ks.HybridStrategy()
    inputs = keras.Input((3,), dtype="int32")
    rows = ks.layers.ShardedEmbedding(10, 2)(inputs)
    model = keras.Model(inputs, keras.layers.Flatten()(rows))
    x, y = np.array([[1, 2, 3], [4, 5, 6]]), np.ones((2, 6), "float32")
    messages = []

    def attempt(function, *args, **kwargs):
        try:
            function(*args, **kwargs)
        except ValueError as error:
            messages.append(str(error))

    with strategy.scope():
        attempt(model.compile, "sgd", "mse", jit_compile=True)
        model.compile("sgd", "mse")
    model.jit_compile = True
    for name in ("fit", "evaluate", "train_on_batch", "test_on_batch"):
        attempt(getattr(model, name), x, y)
    for name in ("predict", "predict_on_batch"):
        attempt(getattr(model, name), x)
    model.jit_compile = False
    return messages, model.fit(x, y, verbose=0).history["loss"]


@pytest.mark.parametrize("engine", engines())
def test_xla_on_several_processes_is_refused(cluster, engine):
    for messages, loss in cluster(engine, 2).run(compile_with_xla):
        assert len(messages) == 7
        for message in messages:
            assert "Received: jit_compile=True on 2 processes" in message
        assert len(loss) == 1


def test_xla_in_one_process():
    messages, loss = compile_with_xla()
    assert not messages and len(loss) == 1


class Noise(keras.layers.Layer):
    """Noise of each kind that needs no seed, in place of its inputs."""

    def call(self, inputs):
        shape = keras.ops.shape(inputs)
        drawn = [
            keras.random.normal(shape),
            keras.random.uniform(shape),
            tf.random.normal(shape),
            tf.random.uniform(shape),
            # In a function of its own, as in a condition.
            tf.cond(
                tf.shape(inputs)[0] > 0,
                lambda: tf.random.normal(shape),
                lambda: tf.zeros(shape),
            ),
        ]
        return keras.ops.concatenate(drawn, axis=1)


def noise(run_eagerly):
    """What steps draw, in their parts of the batch, and what is drawn else."""
    keras.utils.set_random_seed(3)
    strategy = ks.HybridStrategy()
    x = np.zeros((8, 1), "float32")
    noisy = keras.Sequential([Noise(), keras.layers.Dense(1)])
    seen = []

    class Noting(keras.Model):
        def call(self, inputs):
            drawn = noisy.layers[0](inputs)
            tf.numpy_function(
                lambda a: (seen.append(a), np.int64(0))[1], [drawn], tf.int64
            )
            return noisy.layers[1](drawn)

    model = Noting()
    with strategy.scope():
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
    model.fit(x, x, batch_size=8, epochs=2, verbose=0)
    model.evaluate(x, x, batch_size=8, verbose=0)
    outputs = model.predict(x, batch_size=8, verbose=0)
    after = [keras.random.normal((2,)), tf.random.normal((2,))]
    after += [keras.layers.Dense(2).kernel_initializer((2, 2))]
    return [a for a in seen if len(a)], outputs, [np.array(a) for a in after]


@pytest.mark.parametrize("run_eagerly", [False, True])
@pytest.mark.parametrize("engine", engines())
def test_each_rank_draws_its_own_noise(cluster, engine, run_eagerly):
    first, second = cluster(engine, 2).run(noise, run_eagerly)
    again, _ = cluster(engine, 2).run(noise, run_eagerly)
    assert len(first[0]) == len(second[0]) >= 4  # steps
    for ours, theirs in zip(first[0], second[0], strict=True):
        assert ours.shape == theirs.shape == (4, 5)
        assert (np.abs(ours - theirs).max(0) > 1e-3).all()
    # Another draw in the next step of training.
    assert (np.abs(first[0][0] - first[0][1]).max(0) > 1e-3).all()
    # A run repeats another, and ranks draw alike outside of a step.
    for ours, others in zip(first[0], again[0], strict=True):
        np.testing.assert_array_equal(ours, others)
    np.testing.assert_array_equal(first[1], second[1])
    for ours, theirs in zip(first[2], second[2], strict=True):
        np.testing.assert_array_equal(ours, theirs)
