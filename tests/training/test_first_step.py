"""The first step builds the model without reading a batch."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
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


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_a_generator_is_read_once_and_whole(cluster, engine):
    stock = model()
    stock.compile("sgd", "mse", metrics=["mae"])
    expected = stock.fit(batches(), **READ_ONCE).history
    for weights, history in cluster(engine, 2).run(fit_generator):
        for ours, theirs in zip(weights, stock.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5)


class Adversaries(keras.Model):
    """Two models in steps of its own; without a `call`."""

    def __init__(self):
        super().__init__()
        self.makes = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(2)]
        )
        self.tells = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1)]
        )
        self.loss_of = keras.losses.MeanSquaredError()
        self.tracker = keras.metrics.Mean(name="loss")

    def compile(self, makes, tells):
        super().compile()
        self.of_maker, self.of_teller = makes, tells

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self.tells(tf.concat([x, self.makes(x)], axis=0))
            loss = self.loss_of(tf.concat([y, 0 * y], axis=0), found)
        self._apply(self.of_teller, tape, loss, self.tells)
        with tf.GradientTape() as tape:
            other = self.loss_of(y, self.tells(self.makes(x)))
        self._apply(self.of_maker, tape, other, self.makes)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def _apply(self, optimizer, tape, loss, model):
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)


def fit_adversaries(wrap=ks.HybridOptimizer, scope=None):
    keras.utils.set_random_seed(3)
    made = Adversaries()
    with scope or ks.HybridStrategy().scope():
        made.compile(*(wrap(keras.optimizers.SGD(0.1)) for _ in range(2)))
    x = np.random.default_rng(4).normal(size=(16, 2)).astype("float32")
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    return made.fit(x, x[:, :1], epochs=2, **options).history["loss"]


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_models_without_a_call_train(cluster, engine):
    scope = contextlib.nullcontext()
    expected = fit_adversaries(lambda optimizer: optimizer, scope)
    for losses in [fit_adversaries(), *cluster(engine, 2).run(fit_adversaries)]:
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


class OfPairs(keras.Model):
    """Trains on pairs of batches, with labels and without."""

    def train_step(self, data):
        (other, _), (x, y) = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            loss += self.compute_loss(y=0 * other[:, :1], y_pred=self(other))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def fit_pairs(scope=None):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((2,))
    made = OfPairs(inputs, keras.layers.Dense(1)(inputs))
    with scope or ks.HybridStrategy().scope():
        made.compile(keras.optimizers.SGD(0.1), "mse")
    x = np.random.default_rng(4).normal(size=(16, 2)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :1]))
    pairs = tf.data.Dataset.zip((data.shuffle(16, seed=1), data)).batch(8)
    losses = made.fit(pairs, epochs=2, shuffle=False, verbose=0)
    return losses.history["loss"], *made.get_weights()


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_batches_that_are_no_inputs_and_labels(cluster, engine):
    expected = fit_pairs(contextlib.nullcontext())
    for found in [fit_pairs(), *cluster(engine, 2).run(fit_pairs)]:
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)


class OfFour(keras.Model):
    """Trains on batches of more parts than Keras's own steps take."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.loss_of = keras.losses.MeanSquaredError()

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        first, second, scale, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, scale * self(first) - self(second))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def fit_of_four(scope=None):
    keras.utils.set_random_seed(3)
    with scope or ks.HybridStrategy().scope():
        made = OfFour()
        made(np.ones((1, 2)))
        made.compile(keras.optimizers.SGD(0.1))
    x = np.random.default_rng(4).normal(size=(10, 2)).astype("float32")
    parts = x, x[::-1], x[:, :1], x[:, 1:]
    data = tf.data.Dataset.from_tensor_slices(parts).batch(8)
    losses = made.fit(data, epochs=2, shuffle=False, verbose=0)
    return losses.history["loss"], *made.get_weights()


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_batches_of_four(cluster, engine):
    expected = fit_of_four(contextlib.nullcontext())
    for found in [fit_of_four(), *cluster(engine, 2).run(fit_of_four)]:
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)


class MeanOfWords(keras.Model):
    """Reads what a ragged tensor alone has."""

    def __init__(self, kind):
        super().__init__()
        self.words = kind(20, 4, embeddings_initializer="ones")
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, words):
        rows = tf.math.unsorted_segment_mean(
            self.words(words.values), words.value_rowids(), words.nrows()
        )
        return self.dense(tf.reshape(rows, (-1, 4)))


def fit_ragged(kind, scope):
    words = tf.ragged.constant([[1, 2], [3], [], [4, 5, 6], [7], [8, 9]] * 3)
    labels = np.linspace(-1, 1, 18).astype("float32")[:, None]
    dataset = tf.data.Dataset.from_tensor_slices((words, labels)).batch(5)
    ragged = MeanOfWords(kind)
    with scope:
        ragged.compile("sgd", "mse", metrics=["mae"])
    history = ragged.fit(dataset, epochs=2, shuffle=False, verbose=0).history
    return history, ragged.predict(dataset, verbose=0)


def fit_ragged_sharded():
    kind, scope = ks.layers.ShardedEmbedding, ks.HybridStrategy().scope()
    return fit_ragged(kind, scope)


def test_a_model_that_reads_a_ragged_tensor_s_values(cluster):
    expected, predicted = fit_ragged(
        keras.layers.Embedding, contextlib.nullcontext()
    )
    for history, predictions in cluster("native", 2).run(fit_ragged_sharded):
        np.testing.assert_allclose(predictions, predicted, rtol=1e-5)
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5)
