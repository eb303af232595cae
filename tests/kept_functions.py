"""What the ranks run in tests of rows that are brought up to date."""

import contextlib
import functools
import logging
import os
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity._tf.current_variable import keeper_of
from keras_sparsity.conversion import saving
from keras_sparsity.update import kept_rows, rules
from tests.checkpoint_functions import InterruptAfter, Interruption
from tests.oracles import DenseGradients

ROWS, DIM, LENGTH = 50, 4, 5
BATCH, EXAMPLES, EPOCHS = 8, 400, 2
RULES = {
    "adam": ("Adam", {"learning_rate": 0.01}),
    "accumulating": (
        "Adam",
        {"learning_rate": 0.01, "gradient_accumulation_steps": 4},
    ),
    "amsgrad": ("Adam", {"learning_rate": 0.01, "amsgrad": True}),
    "adamw": ("AdamW", {"learning_rate": 0.01, "weight_decay": 0.1}),
    "averaged": (
        "AdamW",
        {
            "learning_rate": 0.01,
            "weight_decay": 0.1,
            "use_ema": True,
            "ema_momentum": 0.9,
        },
    ),
    "adamax": ("Adamax", {"learning_rate": 0.01}),
    "nesterov": (
        "SGD",
        {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True},
    ),
    "rmsprop": (
        "RMSprop",
        {"learning_rate": 0.005, "momentum": 0.8, "centered": True},
    ),
    "adadelta": ("Adadelta", {"learning_rate": 1.0, "weight_decay": 0.01}),
    "nadam": ("Nadam", {"learning_rate": 0.01}),
    "lion": ("Lion", {"learning_rate": 0.003}),
    "ftrl": (
        "Ftrl",
        {"learning_rate": 0.1, "l1_regularization_strength": 0.001},
    ),
}


def made(name):
    kind, options = RULES[name]
    return getattr(keras.optimizers, kind)(**options)


def data():
    """Ids by Zipf; those of the upper half come in some batches alone."""
    rng = np.random.default_rng(6)
    ids = np.minimum(rng.zipf(1.3, (EXAMPLES, LENGTH)) - 1, ROWS // 2)
    ids[::70, 0] = rng.integers(ROWS // 2, ROWS - 5, len(ids[::70]))
    return ids.astype("int32"), rng.normal(size=(EXAMPLES, 1))


def build(layers, optimizer, **compiled):
    """A model of two tables."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    hidden = keras.layers.Concatenate()(
        [keras.layers.Flatten()(layer(inputs)) for layer in layers]
    )
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    rng = np.random.default_rng(2)
    model.set_weights(
        [
            rng.normal(size=w.shape).astype("float32")
            for w in model.get_weights()
        ]
    )
    model.compile(optimizer, loss="mse", run_eagerly=False, **compiled)
    return model


def fit(model, epochs=EPOCHS, callbacks=(), rate_every=1, **more):
    """Trains, with a learning rate that changes after some steps each."""
    ids, labels = data()

    class Rates(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            batch -= batch % rate_every
            rate = base * (1 + np.cos(np.pi * batch / 60))
            self.model.optimizer.learning_rate = rate

    base = float(model.optimizer.learning_rate)
    model.fit(
        ids,
        labels,
        batch_size=BATCH,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[Rates(), *callbacks],
        **more,
    )


@functools.cache
def stock(*names, **how):
    """Weights and slots of stock Keras, fed the dense gradient.

    Args:
        *names: rules, by each of which it trains; the slots are the last's.
        **how: arguments of `fit`.
    """
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(ROWS, DIM) for _ in range(2)]
    model = build(layers, DenseGradients(made(names[0])))
    for name in names:
        model.compile(DenseGradients(made(name)), loss="mse")
        model.run_eagerly = True  # else its gradients would not be dense
        fit(model, **how)
    inner = model.optimizer.inner
    return model.get_weights(), [v.numpy() for v in inner.variables]


def spread(optimizer, partitions=(None, 3), compiled=None, **options):
    rules._SMALL_ELEMENTS = 0
    keras.utils.set_random_seed(1)
    with ks.HybridStrategy(**{"architecture": "hybrid", **options}).scope():
        layers = [
            ks.layers.ShardedEmbedding(ROWS, DIM, num_partitions=count)
            for count in partitions
        ]
        return build(layers, optimizer, **(compiled or {}))


def keepers(model):
    return [
        keeper_of(piece.value)
        for table in saving.tables_of(model)
        for piece in table.pieces
    ]


class Between(keras.callbacks.Callback):
    """Reads, evaluates, moves and repartitions in the first epoch."""

    is_done = False

    def on_train_batch_end(self, batch, logs=None):
        model = self.model
        tables = saving.tables_of(model)
        if self.is_done:
            return
        if batch == 10:
            model.get_weights()
        if batch == 15:
            model.predict(np.zeros((8, LENGTH), "int32"), verbose=0)
        if batch == 20:
            ks.moves.repartition(model, {tables[0]: 5, tables[1]: 1})
            if tables[0].is_sharded:
                assert None not in keepers(model)
        if batch == 30:
            ks.moves.move(model, {tables[0]: "allreduce"})
        if batch == 40:
            ks.moves.move(model, {tables[0]: ("ps", 2)})
            self.is_done = True


class ReadsAlone(keras.callbacks.Callback):
    """Rank 0 alone reads whole tables, which other ranks have, too."""

    def on_train_batch_end(self, batch, logs=None):
        tables = saving.tables_of(self.model)
        if batch % 20 == 10 and tables[0].collectives.rank == 0:
            for table in tables:
                variable = table.variable.value
                ids = np.arange(ROWS)
                rows = tf.gather(variable, ids).numpy()
                np.testing.assert_array_equal(variable.numpy(), rows)
                self.check_function(variable, rows)

    def check_function(self, variable, rows):
        @tf.function
        def twice():
            with tf.GradientTape() as tape:
                tape.watch(variable)
                whole = 2.0 * variable
            return whole, tape.gradient(whole, variable)

        whole, gradient = twice()
        np.testing.assert_array_equal(whole, 2 * rows)
        np.testing.assert_array_equal(gradient, np.full_like(rows, 2))


def train(name, reads_between, options):
    """Weights and state, on every rank."""
    try:
        model = spread(made(name), **options)
        callbacks, more = [], {}
        if reads_between and saving.tables_of(model)[0].has_replicas:
            callbacks = [ReadsAlone()]
        elif reads_between:
            callbacks = [Between()]
            more["validation_data"] = data()
        fit(model, callbacks=callbacks, **more)
        found = keepers(model)
        assert found and None not in found, found
        return model.get_weights(), model.optimizer.state()
    finally:
        rules._SMALL_ELEMENTS = 1 << 15


def train_twice(first, second):
    """Trains an epoch by each of two rules; weights and state of the second."""
    try:
        model = spread(made(first))
        fit(model, epochs=1)
        read = tf.function(lambda ids: saving.tables_of(model)[0].gather(ids))
        read([1])
        tower = keras.Model(model.inputs, model.layers[-2].output)
        ids = data()[0][:BATCH]
        tower.predict(ids, verbose=0)
        old = keepers(model)
        with model.distribute_strategy.scope():
            model.compile(made(second), loss="mse")
        assert keepers(model) == [None] * len(old)
        # Several ranks would have to end.
        if model.distribute_strategy.size == 1:
            with pytest.raises(tf.errors.InvalidArgumentError, match="anew"):
                read([1])
        fit(model, epochs=1)
        rows = [table.read()[ids] for table in saving.tables_of(model)]
        np.testing.assert_allclose(
            tower.predict(ids, verbose=0),
            np.concatenate([r.reshape(BATCH, -1) for r in rows], axis=1),
            atol=1e-6,
        )
        new = keepers(model)
        assert None not in new and not set(new) & set(old)
        return model.get_weights(), model.optimizer.state()
    finally:
        rules._SMALL_ELEMENTS = 1 << 15


def search_partitions(name):
    """Trains by several steps an execution, while partitions are searched.

    Returns:
        Weights, state, and the numbers of partitions that were tried.
    """
    try:
        model = spread(made(name), compiled={"steps_per_execution": 2})
        # Of one sample: each has the step traced anew.
        search = ks.callbacks.PartitionSearch(
            num_steps=4, max_seconds=1, start=5, verbose=0
        )
        fit(model, callbacks=[search], epochs=1, rate_every=2)
        found = keepers(model)
        assert found and None not in found, found
        tried = {s.num_partitions for s in search.result["tables"].samples}
        return model.get_weights(), model.optimizer.state(), tried
    finally:
        rules._SMALL_ELEMENTS = 1 << 15


def train_ordinary(name, architecture, directory, run, interrupt_after):
    """Trains ordinary `Embedding`s with a checkpoint, perhaps to a stop.

    Returns:
        Weights and state.
    """
    try:
        rules._SMALL_ELEMENTS = 0
        keras.utils.set_random_seed(1)
        with ks.HybridStrategy(architecture=architecture).scope():
            layers = [keras.layers.Embedding(ROWS, DIM) for _ in range(2)]
            model = build(layers, made(name))
        path = os.path.join(directory, run)
        callbacks = [ks.callbacks.ShardedCheckpoint(path, every_steps=15)]
        if interrupt_after:
            callbacks.append(InterruptAfter(interrupt_after))
        with contextlib.suppress(Interruption):
            fit(model, callbacks=callbacks)
        found = [keeper_of(layer.embeddings.value) for layer in layers]
        assert None not in found
        return model.get_weights(), model.optimizer.state()
    finally:
        rules._SMALL_ELEMENTS = 1 << 15


def save_and_go_on(directory, interrupt_after, name="accumulating"):
    """Trains with a checkpoint, perhaps until an interruption.

    Returns:
        Weights and state.
    """
    try:
        # Files of "accumulating" hold the gradients of less than four steps.
        model = spread(made(name))
        callbacks = [ks.callbacks.ShardedCheckpoint(directory, every_steps=15)]
        if interrupt_after:
            callbacks.append(InterruptAfter(interrupt_after))
        with contextlib.suppress(Interruption):
            fit(model, callbacks=callbacks)
        assert None not in keepers(model)
        return model.get_weights(), model.optimizer.state()
    finally:
        rules._SMALL_ELEMENTS = 1 << 15


def own_loop(name):
    """Two tables and a function of one's own, rank by rank of the batch."""
    try:
        rules._SMALL_ELEMENTS = 0
        strategy = ks.HybridStrategy()
        table = ks.ShardedTable(ROWS, DIM, 3)
        table.assign(np.ones((ROWS, DIM), "float32"))
        optimizer = ks.HybridOptimizer(made(name))
        optimizer.build([table.variable])
        ids, labels = data()

        def step(ids, labels):
            with tf.GradientTape() as tape:
                rows = tf.reduce_mean(table.gather(ids), axis=[1, 2])
                errors = tf.square(rows - labels[:, 0])
                loss = tf.reduce_sum(errors) / BATCH  # of all ranks
            variables = [table.variable]
            optimizer.apply(tape.gradient(loss, variables), variables)

        run = tf.function(lambda *args: strategy.run(step, args))
        part = slice(strategy.rank, None, strategy.size)
        for batch in range(EXAMPLES // BATCH):
            rows = slice(batch * BATCH, (batch + 1) * BATCH)
            run(
                tf.constant(ids[rows][part]),
                tf.constant(labels[rows][part], tf.float32),
            )
        assert keeper_of(table.pieces[0].value) is not None
        return table.read()
    finally:
        rules._SMALL_ELEMENTS = 1 << 15


def settle_after_a_move():
    """Trains, repartitions, trains and settles, twice.

    Returns:
        The numbers of rows that this rank's owner stores of the first table.
    """
    counts, store = [], kept_rows.store_rows

    def spy(variable, ids, rows):
        if any(variable is piece.value for piece in table.pieces):
            counts.append(int(tf.size(ids)))
        store(variable, ids, rows)

    try:
        model = spread(made("adam"), partitions=(2,))
        fit(model, epochs=1)
        (table,) = saving.tables_of(model)
        ks.moves.repartition(model, {table: 1 + table.layout.num_partitions})
        found = []
        for _ in range(2):
            fit(model, epochs=1)
            with mock.patch.object(kept_rows, "store_rows", spy):
                table.settle()
            found.append(sum(counts))
            counts.clear()
        return found
    finally:
        rules._SMALL_ELEMENTS = 1 << 15


class OwnAdam(keras.optimizers.Adam):
    """A rule of a user's own, of which no closed form is known."""


def told_of_updates():
    """Repartitions a table twice that is updated whole.

    Returns:
        The optimizer's log messages on this rank.
    """
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("keras_sparsity.update.keeping")
    logger.addHandler(handler)
    try:
        model = spread(OwnAdam(), partitions=(2,))
        model.optimizer.build(model.trainable_variables)
        (table,) = saving.tables_of(model)
        for count in (3, 4):
            ks.moves.repartition(model, {table: count})
        assert table.layout.num_partitions == 4
        return [record.getMessage() for record in records]
    finally:
        logger.removeHandler(handler)
        rules._SMALL_ELEMENTS = 1 << 15
