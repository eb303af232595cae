"""Logs of steps: as stock Keras in one process."""

import contextlib
import functools
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity._tf import keras_losses
from keras_sparsity.global_batch import step_metrics
from tests.conftest import engines

pytestmark = pytest.mark.smoke


def two_outputs(run_eagerly, are_reduced=True):
    """Losses of two outputs; the last batch has one example.

    In eager steps Keras knows the sizes of batches, by which it weights them.
    """
    keras.utils.set_random_seed(0)
    inputs = keras.Input((3,))
    outputs = {n: keras.layers.Dense(1, name=n)(inputs) for n in ("a", "b")}
    model = keras.Model(inputs, outputs)
    reduction = "sum_over_batch_size" if are_reduced else None
    strategy = ks.HybridStrategy()
    with strategy.scope():
        model.compile(
            keras.optimizers.SGD(0.1),
            {
                "a": keras.losses.MeanSquaredError(reduction),
                "b": keras.losses.MeanAbsoluteError(reduction),
            },
            run_eagerly=run_eagerly,
        )
    x = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
    labels = {"a": x[:, :1], "b": x[:, 1:2]}
    options = {"batch_size": 6, "shuffle": False, "verbose": 0}
    return model.fit(x, labels, epochs=2, **options).history


@pytest.mark.parametrize(
    "arguments", [(False,), (True,), (True, False)], ids=str
)
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_losses_of_outputs_count_batches_as_keras(cluster, engine, arguments):
    expected = two_outputs(*arguments)
    assert set(expected) == {"a_loss", "b_loss", "loss"}
    for found in cluster(engine, 3).run(two_outputs, *arguments):
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, 1e-5, err_msg=name)


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


class OfLoss(keras.metrics.Metric):
    """The mean of one of Keras's losses, which it sums itself."""

    def __init__(self):
        super().__init__(name="of_loss")
        self.loss_of = keras.losses.BinaryCrossentropy(reduction="sum")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred):
        self.total.assign_add(self.loss_of(y_true, y_pred))
        self.count.assign_add(tf.cast(tf.shape(y_pred)[0], tf.float32))

    def result(self):
        return self.total / self.count


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
        self.of_loss = OfLoss()

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
        own = self.curve, self.of_loss, self.__dict__["recall"]
        for metric in own:
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
    # Keras 3.5 and 3.6 lose the last step where two do not divide an epoch.
    in_twos = IN_TWOS if keras_losses.losses_are_scaled() else {}
    return [
        own_logs(scope),
        own_logs(scope, **EAGER),
        own_logs(scope, **in_twos),
        own_runs(scope),
    ]


def all_own_distributed():
    return all_own(ks.HybridStrategy().scope)


@functools.cache
def all_own_of_stock():
    return all_own(contextlib.nullcontext)


def check_all_own(found):
    for ours, theirs in zip(found, all_own_of_stock(), strict=True):
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            # Not all versions of Keras make nested logs flat.
            keras.tree.assert_same_structure(ours[name], values)
            for one, other in zip(
                *map(keras.tree.flatten, (ours[name], values)), strict=True
            ):
                np.testing.assert_allclose(one, other, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("engine", engines(usually="horovod"))
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
    stock = step_metrics.combined

    def counted(variables, ranks):
        counts.append(tf.executing_eagerly())
        return stock(variables, ranks)

    x, y = classified()
    with mock.patch.object(step_metrics, "combined", counted):
        made.train_on_batch(x[:8], y[:8])
    return counts


def test_metrics_of_a_stock_step_are_one_message(cluster):
    for counts in cluster("native", 2).run(messages_of_a_step):
        assert counts == [False]


class OwnTracker(keras.Model):
    """Tracks numbers of each batch, as in Keras's guide on `train_step`."""

    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1, kernel_initializer="ones")
        self.loss_of = keras.losses.MeanSquaredError()
        self.trackers = {
            name: keras.metrics.Mean(name=name)
            for name in ("plain", "global", "number", "listed", "odd")
        }
        self.batches = self.add_weight(
            dtype="int32", trainable=False, initializer="zeros"
        )

    def call(self, x):
        return self.out(x)

    def step(self, data, training):
        x, y = data
        outputs = self(x, training=training)
        plain = tf.reduce_mean(tf.square(outputs - y))
        self.batches.assign_add(1)
        # First in a branch: what a rank asks others there, it knows outside.
        tf.cond(
            tf.equal(self.batches % 2, 1),
            lambda: self.trackers["odd"].update_state(plain),
            lambda: None,
        )
        self.trackers["plain"].update_state(values=plain)
        # Also reads its result, before another is updated.
        self.trackers["global"](self.loss_of(y, outputs), sample_weight=None)
        self.trackers["number"].update_state(3.0)
        self.trackers["listed"].update_state([plain])
        return {name: each.result() for name, each in self.trackers.items()}

    def train_step(self, data):
        return self.step(data, True)

    def test_step(self, data):
        return self.step(data, False)


def own_trackers(scope, run_eagerly, shard=lambda batches: batches):
    """Logs of uneven batches; the last one is smaller than the ranks are."""
    x = np.random.default_rng(0).normal(size=(22, 3)).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(10)
    model = OwnTracker()
    with scope():
        model.compile(run_eagerly=run_eagerly)
    batches = shard(batches)
    logs = model.fit(batches, epochs=2, shuffle=False, verbose=0).history
    evaluated = model.evaluate(batches, return_dict=True, verbose=0)
    return {**logs, **{f"test_{k}": v for k, v in evaluated.items()}}


def own_trackers_distributed(run_eagerly, is_sharded):
    strategy = ks.HybridStrategy()
    # Of a sharded dataset no rank knows how many examples others have.
    shard = [strategy.shard] * is_sharded
    return own_trackers(strategy.scope, run_eagerly, *shard)


@pytest.mark.parametrize(
    ("run_eagerly", "is_sharded"), [(False, True), (True, False)]
)
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_own_trackers_count_each_batch_once(
    cluster, engine, run_eagerly, is_sharded
):
    expected = own_trackers(contextlib.nullcontext, run_eagerly)
    assert len(expected) == 10
    arguments = run_eagerly, is_sharded
    for found in cluster(engine, 3).run(own_trackers_distributed, *arguments):
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, 1e-5, err_msg=name)


class Adversarial(keras.Model):
    """Two parts that the first step builds, and no `call`."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.layers.Dense(3)])
        self.critic = keras.Sequential(
            [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        )

    def train_step(self, data):
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        logs = {}
        for part, label in ((self.critic, 0.0), (self.generator, 1.0)):
            with tf.GradientTape() as tape:
                verdict = self.critic(self.generator(data))
                value = loss(label + 0 * verdict, verdict)
            weights = part.trainable_variables
            optimizer = self.optimizers_of_parts[label]
            optimizer.apply_gradients(
                zip(tape.gradient(value, weights), weights, strict=True)
            )
            logs[f"loss_{label:.0f}"] = value
        return logs


def adversarial(scope, seed=3, wrapped=lambda optimizer: optimizer):
    """History and weights of a model that its first step builds."""
    keras.utils.set_random_seed(seed)
    model = Adversarial()
    model.optimizers_of_parts = {
        label: wrapped(keras.optimizers.SGD(0.1)) for label in (0.0, 1.0)
    }
    with scope:
        model.compile()
    x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
    history = model.fit(x, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return history.history, model.get_weights()


def adversarial_distributed():
    strategy = ks.HybridStrategy()
    # Another seed on each rank: rank 0's values count.
    seed = 3 + strategy.rank
    return adversarial(strategy.scope(), seed, ks.HybridOptimizer)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_model_that_its_first_step_builds(cluster, engine):
    expected, weights = adversarial(contextlib.nullcontext())
    for found, own in cluster(engine, 2).run(adversarial_distributed):
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, 1e-5)
        for one, other in zip(own, weights, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
