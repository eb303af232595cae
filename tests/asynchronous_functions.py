"""Trainings under `synchronous=False` that ranks run."""

import collections
import contextlib
import functools
import io
import os
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from tests import delayed_loop

BATCH, COUNT, WORDS, EPOCHS = 12, 55, 40, 2
# Of a long table, rows that no batch touches are brought up to date when they
# are read.
LONG = 12_000


def data(count=COUNT):
    draws = np.random.default_rng(3)
    ids = (draws.zipf(1.3, (count, 4)) - 1) % WORDS
    return ids.astype("int32"), draws.normal(size=(count, 2)).astype("float32")


def lost(value):
    """In place of an operation: a worker is lost before this one runs."""
    time.sleep(0.2)  # What does not wait for it has ended.
    raise ArithmeticError("no luck")


def network(embedding=keras.layers.Embedding, words=WORDS):
    """Two embeddings of the same ids, and dense layers."""
    keras.utils.set_random_seed(5)
    inputs = keras.Input((4,), dtype="int32")
    rows = [
        kind(words, 3, name=name)(inputs)
        for kind, name in (
            (keras.layers.Embedding, "stock"),
            (embedding, "own"),
        )
    ]
    features = keras.layers.Flatten()(keras.layers.Concatenate()(rows))
    hidden = keras.layers.Dense(5, activation="tanh")(features)
    return keras.Model(inputs, keras.layers.Dense(2)(hidden))


def train_delayed(rule, staleness, embedding, words, **options):
    """`(weights, optimizer's state, history)` of `delay="fixed"`."""
    layer = getattr(ks.layers, embedding, None) or keras.layers.Embedding
    strategy = ks.HybridStrategy(
        synchronous=False, max_staleness=staleness, delay="fixed", **options
    )
    with strategy.scope():
        model = network(layer, words)
        model.compile(delayed_loop.RULES[rule](), "mse")
    history = model.fit(
        *data(), BATCH, epochs=EPOCHS, shuffle=False, verbose=0
    ).history
    return model.get_weights(), model.optimizer.state(), history


def train_several(cells, **options):
    return [train_delayed(*cell, **options) for cell in cells]


def train_compensated(cells, strength):
    return train_several(cells, delay_compensation=strength)


def dense():
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Rescaling(1 / WORDS),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(2),
        ]
    )


RULES = {
    **delayed_loop.RULES,
    "adamw": lambda: keras.optimizers.AdamW(0.05, 0.3, epsilon=1e-3),
    "clipnorm": lambda: keras.optimizers.SGD(0.3, clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.SGD(0.3, clipvalue=0.02),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.3, global_clipnorm=0.1),
}


def train_dense(rule, is_served):
    """`((weights, optimizer's state, losses), staleness)` of `dense`."""
    model, optimizer = dense(), RULES[rule]()
    strategy = tf.distribute.get_strategy()
    if is_served:
        strategy = ks.HybridStrategy(synchronous=False, max_staleness=2)
    with strategy.scope():
        model.compile(optimizer, "mse")
    x, y = data()
    history = model.fit(
        x.astype("float32"), y, BATCH, 3, shuffle=False, verbose=0
    )
    state = [v.numpy() for v in optimizer.variables]
    found = model.get_weights(), state, history.history["loss"]
    return found, getattr(strategy, "staleness", None)


class OwnRows(keras.layers.Layer):
    """Its output's gradient is 1 for some rows of this rank.

    With a learning rate of -1, weights are the numbers of the ranks' updates.
    They are of two variables, one dense, one an `Embedding`'s, of which servers
    store each so-manieth row: a rank has a row at each server.

    Args:
        rank, size: the rank, of how many.
        num_pieces: the number of servers.
        begin: function of the weights, called when a step has pulled them.
    """

    def __init__(self, rank, size, num_pieces, begin):
        super().__init__()
        self._own = np.eye(size, dtype="float32")[rank]
        self._begin, self._shape = begin, (2, size, num_pieces)
        self.number = size * num_pieces
        # Large enough to be cut.
        self.kernel = self.add_weight(
            shape=(self.number, 2048), initializer="zeros"
        )
        self.rows = keras.layers.Embedding(
            3000 * num_pieces, 2, embeddings_initializer="zeros"
        )

    def call(self, ids, training=False):
        kernel = tf.convert_to_tensor(self.kernel.value)
        found = self._by_rank(tf.stack([kernel[:, 0], self.rows(ids)[0, :, 0]]))
        if training:
            begun = tf.numpy_function(self._begin, [found], tf.float32)
            found += tf.ensure_shape(begun, [])
        return tf.reduce_sum(found * self._own, keepdims=True)

    def _by_rank(self, values):
        values = tf.transpose(tf.reshape(values, self._shape), [0, 2, 1])
        return tf.reshape(values, [-1, self._shape[1]])

    def weights_by_rank(self):
        """As `begin` gets them: of all ranks, for each piece."""
        kernel, rows = self.get_weights()
        return self._by_rank(
            tf.stack([kernel[:, 0], rows[: self.number, 0]])
        ).numpy()


@keras.saving.register_keras_serializable(package="tests")
def first_output(y, outputs):
    return tf.reduce_mean(outputs)


def _count_updates(bound, begin, count, **options):
    """Trains `OwnRows` on batches of one; the weights and `staleness`."""
    strategy = ks.HybridStrategy(
        synchronous=False, max_staleness=bound, **options
    )
    rank, collectives = strategy.rank, strategy.collectives
    size, seen = collectives.num_workers, []

    def pulled(weights):
        seen.append(-weights)
        begin(rank, len(seen))
        return np.float32(0)

    with strategy.scope():
        # A server takes no step.
        of_rank = min(rank, size - 1), size, collectives.num_servers or size
        layer = OwnRows(*of_rank, pulled)
        inputs = keras.Input((layer.number,), dtype="int32")
        model = keras.Sequential([inputs, layer])
        model.compile(keras.optimizers.SGD(1.0), first_output)
    x = np.tile(np.arange(layer.number, dtype="int32"), (count, 1))
    model.fit(x, np.zeros((count, 1), "float32"), 1, verbose=0)
    # Both variables are cut, and each server has its part of each.
    pulled = [t.pulled_bytes for t in strategy.epoch_figures.servers.values()]
    least_bytes = layer.number // len(pulled) * 2048 * 4 * count
    assert min(pulled) == max(pulled) > least_bytes, pulled
    return seen, -layer.weights_by_rank(), strategy.staleness


def watched_pulls(bound, count, path):
    """Weights at each pull, with random delays; see `_count_updates`.

    Rank 1 waits in its sixth step until rank 0 leads by the bound.
    """
    draws = np.random.default_rng(ks.HybridStrategy().rank)

    def begin(rank, step):
        if rank == 0 and step == 6 + bound:
            pathlib.Path(path).touch()
        while rank == 1 and step == 6 and not os.path.exists(path):
            time.sleep(0.01)
        if draws.random() < 0.1:
            time.sleep(draws.exponential(0.01) * (1 + rank))

    return _count_updates(bound, begin, count)


def one_waits(bound, path, **options):
    """Rank 1 waits in its first step for rank 0's twentieth to have ended.

    And rank 0, in its own first step, for rank 1's to have begun.
    """

    def wait_for(path):
        while not os.path.exists(path):
            time.sleep(0.01)

    def begin(rank, step):
        if rank == 0 and step == 21:
            pathlib.Path(path).touch()
        if rank == 0:
            wait_for(f"{path}-begun")
        else:
            pathlib.Path(f"{path}-begun").touch()
            wait_for(path)

    seen, weights, staleness = _count_updates(bound, begin, 40, **options)
    return len(seen), weights, staleness


def one_waits_and_is_aware(path):
    return one_waits(None, path, staleness_aware=True)


class Waiting(keras.layers.Layer):
    """Returns its input, in training when a function has returned.

    Args:
        wait: the function.
    """

    def __init__(self, wait):
        super().__init__()
        self._wait = wait

    def call(self, inputs, training=False):
        if not training:
            return inputs
        with tf.control_dependencies([inputs]):
            waited = tf.numpy_function(self._wait, [], tf.float32)
        with tf.control_dependencies([waited]):
            return tf.identity(inputs)


def compensated(path, strength):
    """Rank 1 pushes one gradient, after three others since its pull.

    Returns:
        The weights of a kernel and of rows whose gradients are `[1, 2, 2]`,
        and 0.5 and 1 of the rows 1 and 2, in all of four steps; and the version
        of this rank's pulls.
    """
    strategy = ks.HybridStrategy(synchronous=False, delay_compensation=strength)
    rank = strategy.rank

    def wait():
        if rank == 1:
            pathlib.Path(f"{path}-begun").touch()
        while not os.path.exists(path if rank == 1 else f"{path}-begun"):
            time.sleep(0.01)
        return np.float32(0)

    inputs = keras.Input((3,), dtype="int32")
    embedding = keras.layers.Embedding(4, 2, embeddings_initializer="zeros")
    rows = keras.ops.sum(embedding(inputs), (1, 2), keepdims=False)
    product = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    outputs = product(keras.ops.cast(inputs, "float32"))[:, 0] + 0.5 * rows
    model = keras.Model(inputs, Waiting(wait)(outputs))
    with strategy.scope():
        model.compile(keras.optimizers.SGD(1.0), first_output)
    steps = []

    def end_step(batch, logs):
        steps.append(int(model.optimizer.iterations))
        if rank == 0 and len(steps) == 3:
            pathlib.Path(path).touch()

    model.fit(
        *(np.array([[1, 2, 2]] * 4, "int32"), np.zeros(4, "float32"), 1),
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=end_step)],
        verbose=0,
    )
    (kernel,), (table,) = product.get_weights(), embedding.get_weights()
    return kernel[:, 0], table, steps


def not_stale(delay):
    """Weights without staleness, and of synchronous training."""
    x, y = data()
    found = []
    for options in (
        {"synchronous": False, "max_staleness": 0, "delay": delay},
        {"architecture": "hybrid"},
    ):
        strategy, model = ks.HybridStrategy(**options), network()
        with strategy.scope():
            model.compile(keras.optimizers.Adam(0.01), "mse")
        model.fit(x, y, BATCH, shuffle=False, verbose=0)
        assert isinstance(model.optimizer, ks.HybridOptimizer)
        found.append(model.get_weights())
    return found


@keras.saving.register_keras_serializable(package="tests")
def label(y, outputs):
    return y


class CountCalls(keras.callbacks.Callback):
    """Counts the calls of its methods, and keeps the rates at ends of epochs.

    Attributes:
        calls: dict from the name of a method to a number.
        rates: list of the learning rates.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.rates = collections.Counter(), []
        for name in (
            *("on_train_begin", "on_train_end"),
            *("on_epoch_begin", "on_epoch_end"),
            *("on_train_batch_begin", "on_train_batch_end"),
        ):
            setattr(self, name, functools.partial(self._count, name))

    def _count(self, name, *args, **kwargs):
        self.calls[name] += 1
        if name == "on_epoch_end":
            self.rates.append(float(self.model.optimizer.learning_rate))


# Of the epochs of `linear`: by a schedule, then halved as a metric is constant.
RATES = [1.0, 0.5, 0.25]


def linear(bound, folder):
    """A loss whose gradient does not depend on the weights.

    Returns:
        Weights, a table, the history, `CountCalls`'s counts and rates, and
        what `fit` has printed.
    """
    strategy = ks.HybridStrategy(synchronous=False, max_staleness=bound)
    inputs = keras.Input((4,), dtype="int32")
    embedding = keras.layers.Embedding(
        WORDS, 2, embeddings_initializer="zeros", name="rows"
    )
    rows = keras.ops.sum(embedding(inputs), (1, 2), keepdims=False)
    product = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    outputs = product(keras.ops.cast(inputs, "float32"))[:, 0] + rows
    model = keras.Model(inputs, outputs)
    with strategy.scope():
        model.compile(keras.optimizers.SGD(1.0), first_output, metrics=[label])
    read = _read_by_workers(strategy)
    count, printed = CountCalls(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        history = model.fit(
            read,
            epochs=len(RATES),
            validation_data=read,
            callbacks=[
                keras.callbacks.LearningRateScheduler(
                    lambda epoch, rate: [*RATES[:2], rate][epoch]
                ),
                keras.callbacks.ReduceLROnPlateau(
                    *("label", 0.5), patience=1, mode="min", min_lr=RATES[-1]
                ),
                count,
            ],
            verbose=2,
        )
    model.save(f"{folder}/model.keras")
    (kernel,), (table,) = product.get_weights(), embedding.get_weights()
    results = model.evaluate(read, verbose=0), model.predict(read, verbose=0)
    return (
        *(kernel[:, 0], table, history.history, results),
        *(dict(count.calls), count.rates, printed.getvalue()),
    )


def _read_by_workers(strategy):
    """A dataset of full batches, of which a server may read none."""
    x, y = data(5 * BATCH)

    def load(position):
        if strategy.collectives.is_server:
            raise AssertionError("A server has read its input.")
        return position

    def decode(position):
        position = tf.numpy_function(load, [position], tf.int64)
        position = tf.ensure_shape(position, [])
        return tf.gather(x, position), tf.gather(y[:, 0], position)

    return tf.data.Dataset.range(len(x)).map(decode).batch(BATCH)


class StopOn(keras.callbacks.Callback):
    """One rank alone stops, in its first step of the second epoch."""

    def __init__(self, is_stopping):
        super().__init__()
        self._is_stopping = is_stopping
        self._epoch = None

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self._is_stopping and self._epoch == 1:
            self.model.stop_training = True


def unknown_length(num_batches):
    """A dataset of unknown length, moving averages, and a rank that stops."""
    strategy = ks.HybridStrategy(synchronous=False, max_staleness=1)
    keras.utils.set_random_seed(strategy.rank)  # Rank 0's weights count.
    norm = keras.layers.BatchNormalization(momentum=0.5)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), norm, keras.layers.Dense(2)]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = data(num_batches * BATCH)
    dataset = tf.data.Dataset.from_tensor_slices((x.astype("float32"), y))
    dataset = dataset.batch(BATCH).filter(lambda x, y: True)
    totals = []
    count = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: totals.append(sum(strategy.staleness.values()))
    )
    history = model.fit(
        dataset,
        epochs=5,
        callbacks=[StopOn(strategy.rank == 1), count],
        shuffle=False,
        verbose=0,
    )
    return totals, history.history["loss"], model.get_weights()


def reported(folder, wire_dtype):
    """`(figures of the last epoch, number of all weights, version)`."""
    strategy = ks.HybridStrategy(
        synchronous=False, max_staleness=1, wire_dtype=wire_dtype
    )
    model = dense()
    with strategy.scope():
        model.compile(keras.optimizers.Adam(0.01), "mse")
    x, y = data()
    logger = ks.callbacks.ArchitectureLogger(folder)
    model.fit(
        *(x.astype("float32"), y, BATCH, EPOCHS), callbacks=[logger], verbose=0
    )
    number = sum(int(np.prod(w.shape)) for w in model.get_weights())
    version = int(model.optimizer.iterations)
    return strategy.epoch_figures, number, version


def linear_tables(number, is_eager=False):
    """The tables of a loss whose gradients do not depend on the weights.

    Their sizes differ; each column of the ids is one table's.
    """
    strategy = ks.HybridStrategy(synchronous=False, max_staleness=2)
    ids, sizes = _ids_of_tables(number)
    inputs = keras.Input((number,), dtype="int32")
    tables = [
        keras.layers.Embedding(size, 2, embeddings_initializer="zeros")
        for size in sizes
    ]
    rows = [table(inputs[:, i]) for i, table in enumerate(tables)]
    model = keras.Model(inputs, keras.ops.sum(keras.ops.stack(rows), (0, 2)))
    with strategy.scope():
        model.compile(
            keras.optimizers.SGD(1.0), first_output, run_eagerly=is_eager
        )
    model.fit(ids, np.zeros(len(ids)), BATCH, verbose=0)
    return [table.get_weights()[0] for table in tables]


def gradients_of_linear_tables(number):
    """What `linear_tables` has subtracted in all, negative."""
    ids, sizes = _ids_of_tables(number)
    found = [np.zeros((size, 2)) for size in sizes]
    for table, column in zip(found, ids.T, strict=True):
        np.add.at(table, column, -1 / BATCH)
    return found


def _ids_of_tables(number):
    sizes = np.geomspace(7, LONG, number).astype(int)
    draws = np.random.default_rng(4)
    ids = [draws.integers(size, size=5 * BATCH) for size in sizes]
    return np.stack(ids, 1).astype("int32"), sizes.tolist()
