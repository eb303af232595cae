"""Rows that a step pulls: how many requests, and when."""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity._tf.tf_sessions import function_of
from keras_sparsity.asynchronous import sessions, store
from keras_sparsity.asynchronous.pushing import Pushing
from tests import asynchronous_functions as functions
from tests import oracles

ROWS, MANY, STEPS = 20, 26, 3


class Tables(keras.Model):
    """The sum of a row of each table.

    Args:
        number: of the tables.
    """

    has_others = True

    def __init__(self, number):
        super().__init__()
        self.tables = [keras.layers.Embedding(ROWS, 3) for _ in range(number)]
        if self.has_others:
            self.last = keras.layers.Dense(1)
        self(np.zeros((1, MANY), "int32"))

    def rows(self, ids):
        # The ids are computed: of a batch, in a graph.
        ids = (ids + 1) % ROWS
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return keras.ops.sum(keras.ops.stack(rows), 0)

    def call(self, ids):
        return self.last(self.rows(ids))


class OfLoss(Tables):
    """Looks up rows in its loss, too."""

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        y_pred = y_pred + keras.ops.sum(self.rows(x[:, ::-1]), 1, keepdims=True)
        return super().compute_loss(x, y, y_pred, *args, **kwargs)


class OwnStep(Tables):
    """Has a step of its own."""

    def train_step(self, batch):
        x, y, *_ = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


class Random(Tables):
    """Looks up rows that the batch does not tell, too."""

    def call(self, ids, training=False):
        outputs = super().call(ids)
        if not training:
            return outputs
        drawn = tf.random.uniform([2, MANY], maxval=ROWS, dtype=tf.int32)
        return outputs + 0 * tf.reduce_sum(self.rows(drawn))


class InBranch(Tables):
    """Looks its rows up in a branch."""

    def rows(self, ids):
        rows = super().rows
        return tf.cond(
            tf.reduce_all(ids >= 0), lambda: rows(ids), lambda: rows(-ids)
        )


class OfDrawnIds(keras.Model):
    """The sum of the rows of its ids, of which a random 0 makes a secret."""

    def __init__(self):
        super().__init__()
        self.table = keras.layers.Embedding(ROWS, 2)
        self.bias = self.add_weight(shape=(), initializer="zeros")
        self(np.zeros((1, 3), "int32"))

    def call(self, ids):
        ids = ids + tf.random.uniform(tf.shape(ids), maxval=1, dtype=tf.int32)
        return tf.reduce_sum(self.table(ids), (1, 2)) + self.bias


class OfSampledIds(OfDrawnIds):
    """Of ids that an operation with a state draws."""

    def call(self, ids):
        true = tf.cast(ids[:, :1], tf.int64)
        sampled, *_ = tf.random.log_uniform_candidate_sampler(
            true, 1, 3, True, ROWS
        )
        return super().call(ids + 0 * tf.cast(sampled, ids.dtype))


class AppliesInFunction(OfDrawnIds):
    """Applies its gradients in a function."""

    def train_step(self, batch):
        x, y, *_ = keras.utils.unpack_x_y_sample_weight(batch)
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(x, training=True))
        gradients = tape.gradient(loss, variables)
        tf.function(lambda: self.optimizer.apply(gradients, variables))()
        return {"loss": loss}


class Alone(Tables):
    """Has no other weights than tables."""

    has_others = False

    def call(self, ids):
        return keras.ops.sum(self.rows(ids), 1, keepdims=True)


class InFunctions(keras.Model):
    """Looks rows up, and changes its state, in functions that are kept."""

    def __init__(self, number):
        super().__init__()
        self.table = keras.layers.Embedding(ROWS, 3)
        self.norm = keras.layers.BatchNormalization()
        self.last = keras.layers.Dense(number)
        self.looked_up = tf.function(lambda ids: self.table(ids))
        self.normed = tf.function(self.norm)
        self(np.zeros((1, MANY), "int32"))

    def call(self, ids, training=False):
        rows = self.normed(self.looked_up(ids), training=training)
        return self.last(keras.ops.mean(rows, 1))


class InLoop(keras.Model):
    """Looks rows up in a loop."""

    def __init__(self, number):
        super().__init__()
        self.table = keras.layers.Embedding(ROWS, 3)
        self.last = keras.layers.Dense(number)
        self(np.zeros((1, MANY), "int32"))

    def call(self, ids):
        ids = keras.ops.transpose(ids)
        rows = tf.map_fn(self.table, ids, fn_output_signature=tf.float32)
        return self.last(keras.ops.mean(rows, 0))


class TwoUpdates(Tables):
    """Applies the gradients of tables, then the others."""

    def train_step(self, batch):
        x, y, *_ = keras.utils.unpack_x_y_sample_weight(batch)
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply(gradients[:1], variables[:1])
        self.optimizer.apply(gradients[1:], variables[1:])
        return {"loss": loss}


def _trained(kind, number, is_served, callbacks=(), **options):
    """Weights of a model after `STEPS` steps of an epoch."""
    keras.utils.set_random_seed(1)
    model = kind(number)
    optimizer = keras.optimizers.Adagrad(0.1)
    if is_served:
        strategy = ks.HybridStrategy(synchronous=False, max_staleness=1)
        with strategy.scope():
            model.compile(optimizer, "mse", **options)
    else:
        oracles.dense_reference(model, optimizer, loss="mse")
    draws = np.random.default_rng(2)
    ids = draws.integers(ROWS, size=(8 * STEPS, MANY)).astype("int32")
    labels = draws.normal(size=(len(ids), 1)).astype("float32")
    model.fit(
        *(ids, labels, 8),
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
        validation_data=(ids, labels),
    )
    return model.get_weights()


class OfOddIds(keras.Model):
    """The sum of rows of a batch whose first id is odd, else 0."""

    def __init__(self, num_rows):
        super().__init__()
        self.table = keras.layers.Embedding(num_rows, 2)
        self(np.zeros((1, 3), "int32"))

    def call(self, ids):
        return tf.cond(
            tf.equal(ids[0, 0] % 2, 1),
            lambda: tf.reduce_sum(self.table(ids), (1, 2)),
            lambda: tf.zeros([tf.shape(ids)[0]]),
        )


def _requests(monkeypatch, kind, number):
    """The numbers of requests between the ends of steps."""
    made, ends = [], []

    def counting(*args):
        call = function_of(*args)

        def counted(*values):
            made.append(1)
            return call(*values)

        return counted

    monkeypatch.setattr(sessions, "function_of", counting)
    end = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: ends.append(len(made))
    )
    found = _trained(kind, number, True, [end])
    expected = _trained(kind, number, False)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)
    return np.diff(ends).tolist()


@pytest.mark.parametrize(
    "kind, number",
    [(Tables, 1), (Tables, MANY), (OfLoss, 2), (OwnStep, 2)],
)
def test_tables_of_a_batch_are_pulled_together(monkeypatch, kind, number):
    # A batch's number, a pull and a push.
    assert _requests(monkeypatch, kind, number) == [3] * (STEPS - 1)


def test_rows_that_no_batch_tells_are_pulled_by_table(monkeypatch):
    # Beside the three of all steps one that waits for the bound.
    number = 3
    expected = [4 + number] * (STEPS - 1)
    assert _requests(monkeypatch, Random, number) == expected


@pytest.mark.parametrize("kind", [OfDrawnIds, OfSampledIds, AppliesInFunction])
def test_rows_that_no_batch_tells_come_beside_the_weights(monkeypatch, kind):
    pull, rows_of, begun = store.Store.pull, store.Store.rows_of, []
    has_come = threading.Event()

    def late_pull(self, *args):
        begun.append(has_come.wait(20))
        has_come.clear()
        return pull(self, *args)

    def late_rows_of(self, variable):
        read = rows_of(self, variable)

        def rows(ids):
            has_come.set()
            time.sleep(0.3)  # Their gradient could be pushed before.
            return read(ids)

        return rows

    monkeypatch.setattr(store.Store, "pull", late_pull)
    monkeypatch.setattr(store.Store, "rows_of", late_rows_of)
    _check_trains(kind(), 0.5)
    assert begun == [True] * STEPS


def _check_trains(model, compensation=None):
    """In an `OfDrawnIds` gradients depend on neither weights nor rows."""
    expected = model.table.get_weights()[0].astype("float64")
    strategy = ks.HybridStrategy(
        synchronous=False, max_staleness=1, delay_compensation=compensation
    )
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), functions.first_output)
    ids = np.random.default_rng(2).integers(ROWS, size=(2 * STEPS, 3))
    labels = np.zeros(len(ids), "float32")
    model.fit(ids.astype("int32"), labels, 2, shuffle=False, verbose=0)
    # One worker's rows are of the last version: nothing to compensate.
    np.add.at(expected, ids.reshape(-1), -0.1 / 2)
    np.testing.assert_allclose(model.table.get_weights()[0], expected, 1e-5)


@pytest.mark.parametrize("kind", [OfDrawnIds, OfSampledIds, AppliesInFunction])
def test_a_push_follows_the_pull_of_its_step(monkeypatch, kind):
    pull, begin, events = store.Store.pull, Pushing.begin, []

    def late_pull(self, *args):
        found = pull(self, *args)
        time.sleep(0.3)  # Rows beside it have come.
        events.append("pull")
        return found

    def noted_begin(self, *args):
        events.append("push")
        return begin(self, *args)

    monkeypatch.setattr(store.Store, "pull", late_pull)
    monkeypatch.setattr(Pushing, "begin", noted_begin)
    _check_trains(kind())
    assert events == ["pull", "push"] * STEPS


def test_rows_in_a_branch_are_pulled_behind_the_bound(monkeypatch):
    events = []

    pull, rows_of = store.Store.pull, store.Store.rows_of

    def late_pull(self, *args):
        time.sleep(0.2)  # At the bound; branches could begin.
        found = pull(self, *args)
        events.append("pull")
        return found

    def noted_rows_of(self, variable):
        read = rows_of(self, variable)

        def rows(ids):
            events.append("rows")
            return read(ids)

        return rows

    monkeypatch.setattr(store.Store, "pull", late_pull)
    monkeypatch.setattr(store.Store, "rows_of", noted_rows_of)
    found = _trained(InBranch, 2, True)
    assert events == ["pull", "rows", "rows"] * STEPS
    for one, other in zip(found, _trained(InBranch, 2, False), strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)


@pytest.mark.parametrize("compensation", [None, 0.5])
def test_a_branch_without_lookups_moves_no_row(compensation):
    keras.utils.set_random_seed(1)
    number = 6
    model = OfOddIds(number)
    expected = model.get_weights()[0].astype("float64")
    strategy = ks.HybridStrategy(
        synchronous=False,
        max_staleness=1,
        sparse_updates="lazy",
        delay_compensation=compensation,
    )
    with strategy.scope():
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.5), functions.first_output
        )
    # The third batch has all rows.
    ids = np.array(
        [[[1, 3, 3], [5, 3, 0]], [[2, 1, 0], [1, 1, 3]], [[3, 5, 1], [0, 2, 4]]]
    )
    model.fit(
        *(ids.reshape(6, 3).astype("int32"), np.zeros(6, "float32"), 2),
        shuffle=False,
        verbose=0,
    )
    momentum = np.zeros((number, 1))
    for batch in ids[[0, 2]]:  # The other one looks nothing up.
        gradient = np.zeros((number, 1))
        np.add.at(gradient, batch.reshape(-1), 1 / 2)
        touched = np.unique(batch)
        momentum[touched] = 0.5 * momentum[touched] - 0.1 * gradient[touched]
        expected[touched] += momentum[touched]
    np.testing.assert_allclose(model.get_weights()[0], expected, 1e-5, 1e-6)
    (traffic,) = strategy.epoch_figures.servers.values()
    of_row = 8 + 2 * 4 * (1 + (compensation is not None))
    assert traffic.pushed_bytes == (4 + number) * of_row


@pytest.mark.parametrize("kind", [InFunctions, InLoop])
def test_lookups_in_functions_and_loops(kind):
    """TensorFlow keeps functions, which no trace before may spoil."""
    found, expected = (_trained(kind, 1, served) for served in (True, False))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)


@pytest.mark.parametrize("kind", [Tables, Alone])
def test_eager_steps(kind):
    found = _trained(kind, 2, True, run_eagerly=True)
    for one, other in zip(found, _trained(kind, 2, False), strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)


def test_a_step_pushes_once():
    with pytest.raises(ValueError, match="applies gradients twice"):
        _trained(TwoUpdates, 2, True)


@pytest.mark.parametrize(
    "num_servers, number, is_eager",
    [(0, MANY, False), (2, MANY, False), (2, 3, True)],
)
def test_workers_of_several_servers_pull_together(
    cluster, num_servers, number, is_eager
):
    ranks = cluster("native", 2, num_servers=num_servers).run(
        functions.linear_tables, number, is_eager
    )
    expected = functions.gradients_of_linear_tables(number)
    for tables in ranks:
        for table, gradient in zip(tables, expected, strict=True):
            np.testing.assert_allclose(table, gradient, 1e-5)
