"""What the ranks run in tests of moves."""

import ctypes
import gc
import os
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.checkpoint import storage
from keras_sparsity.conversion import saving
from keras_sparsity.moves import relocation
from keras_sparsity.placement import choice
from tests import checkpoint_functions, matrix
from tests.checkpoint_functions import Peak

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def train_all(cells):
    """The outcomes of several cells, given as JSON."""
    return [matrix.train(cell) for cell in cells]


def assert_same(arrays, others):
    for array, other in zip(arrays, others, strict=True):
        np.testing.assert_array_equal(array, other)


def everything(model):
    return [*model.get_weights(), *model.optimizer.state()]


# Models that have one table.


class Second(keras.Model):
    """A second optimizer beside its own trains a table."""

    def __init__(self, words):
        super().__init__()
        self.words = words
        self.flat = keras.layers.Flatten()
        self.out = keras.layers.Dense(1)

    def call(self, ids):
        return self.out(self.flat(self.words(ids)))

    def get_config(self):
        return {}  # It is saved, not loaded.

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        words, *others = self.trainable_variables
        of_words, *of_others = tape.gradient(loss, [words, *others])
        self.second.apply([of_words], [words])
        self.optimizer.apply(of_others, others)
        return {"loss": loss}


def train_models_of_one_table(target):
    """Predictions of models; with a target, one moves the table between.

    Another trains it by an optimizer beside `model.optimizer`; a third, a tower
    that is not compiled, only predicts.
    """
    keras.utils.set_random_seed(0)
    words = ks.layers.ShardedEmbedding(40, 4, num_partitions=2, name="words")
    ids = keras.Input((2,), dtype="int32")
    rows = keras.layers.Flatten()(words(ids))
    one, other = keras.Model(ids, keras.layers.Dense(1)(rows)), Second(words)
    tower = keras.Model(ids, rows)
    x = np.arange(24).reshape(12, 2) % 40
    other(x)
    with ks.HybridStrategy(architecture="hybrid").scope():
        for model in (one, other):
            model.compile(keras.optimizers.Adam(0.01), "mse")
        other.second = ks.HybridOptimizer(keras.optimizers.Adam(0.01))

    def train():
        for model in (other, one):
            model.fit(x, np.ones((12, 1)), 6, shuffle=False, verbose=0)
        found = [each.predict(x, verbose=0) for each in (other, tower)]
        return np.concatenate(found, axis=1)

    train()
    if target is not None:
        ks.moves.move(one, {words.table: target})
    return train()


def other_models_follow():
    expected = train_models_of_one_table(None)
    found = train_models_of_one_table(("ps", 3))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# A model that is used in every way once its tables have moved.


def use_after_moves(directory):
    model = checkpoint_functions.build(partitions=(1, 3), dropout=0.0)
    x, y = checkpoint_functions.arrays()
    model.fit(x, y, batch_size=16, verbose=0)
    tables = saving.tables_of(model)
    optimizer, inner = model.optimizer, model.optimizer.inner_optimizer
    inner.of_the_user = "kept"
    inner.learning_rate = 0.02
    before = everything(model), model.predict(x, verbose=0)
    old = tables[0].partitions[0].value
    stale = tf.function(lambda: tf.gather(old, [0]))
    stale()
    freed = [
        weakref.ref(v.value)
        for pieces in (tables[1].partitions, *_slots(model, tables[1]))
        for v in pieces
    ]

    ks.moves.repartition(model, {tables[0]: 4, tables[1]: 2})
    assert [t.layout.num_partitions for t in tables] == [4, 2]
    assert model.optimizer is optimizer
    assert optimizer.inner_optimizer is inner
    assert inner.of_the_user == "kept"
    assert float(inner.learning_rate) == np.float32(0.02)
    assert_same(everything(model), before[0])
    assert_same([model.predict(x, verbose=0)], before[1:])
    with pytest.raises(tf.errors.InvalidArgumentError):
        stale()
    # Without what was traced, which may be in use, nothing has them.
    gc.collect()
    assert not [ref for ref in freed if ref() is not None]

    path = os.path.join(directory, "model.keras")
    model.save(path)
    with ks.HybridStrategy(architecture="hybrid").scope():
        loaded = keras.models.load_model(path)
    assert_same(everything(loaded), before[0])
    plain = ks.export(model)
    assert_same(plain.get_weights(), before[0][: len(plain.get_weights())])
    communicator = ks.collectives.current()
    position = {"epoch": 0, "step": 1}
    storage.save(model, directory, position, communicator, keep=1)
    ks.moves.move(model, {tables[0]: "allgather", tables[1]: "allreduce"})
    assert_same(everything(model), before[0])
    plain = ks.export(model)
    assert_same(plain.get_weights(), before[0][: len(plain.get_weights())])
    _change(model)
    ks.callbacks.ShardedCheckpoint(directory).restore(model)
    assert_same(everything(model), before[0])
    # And the other way: stored once, read as partitions.
    storage.save(model, directory, position, communicator, keep=1)
    ks.moves.move(model, {tables[0]: "ps", tables[1]: ("ps", 3)})
    assert [t.layout.num_partitions for t in tables] == [4, 3]
    _change(model)
    ks.callbacks.ShardedCheckpoint(directory).restore(model)
    assert_same(everything(model), before[0])


def _slots(model, table):
    return model.optimizer.slots_of(table.variable).values()


def _change(model):
    for weight in model.weights:
        weight.assign(weight.numpy() + 1)


# Memory.


def peak_memory(num_rows, dim):
    """MiB of this rank's part, and by which moves raise the most in memory."""
    # What is freed leaves the process at once: glibc would keep parts below 32
    # MiB for later, more or fewer of them by what the threads do meanwhile.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    layer = ks.layers.ShardedEmbedding(
        num_rows, dim, embeddings_initializer="zeros"
    )
    model = keras.Sequential([keras.Input((4,), dtype="int32"), layer])
    with ks.HybridStrategy(architecture="hybrid").scope():
        model.compile(keras.optimizers.SGD(momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    layer.table.assign(np.ones((num_rows, dim), "float32"))
    gc.collect()
    peaks = []
    for count in (8, 2):  # each rank has half of the rows by both
        with Peak() as moving:
            ks.moves.repartition(model, {layer.table: count})
        peaks.append(moving.mebibytes)
    communicator = ks.collectives.current()
    part = layer.table.layout.num_stored_rows(communicator.rank)
    return part * dim * 4 / 2**20, peaks


def relocate_in_blocks():
    """Rows and bits, by blocks of a few rows, between all kinds of places."""
    communicator = ks.collectives.current()
    rng = np.random.default_rng(2)
    shape = (61, 3)
    bits = rng.integers(0, 256, (*shape, 4), dtype=np.uint8)
    whole = bits.view(np.float32)[..., 0]  # NaNs of all kinds, too
    table = ks.ShardedTable(*shape, num_partitions=3, initializer="zeros")
    relocation._BLOCK_BYTES = 100
    try:
        table.assign(whole)
        for architecture, count in [
            ("ps", 1),
            ("ps", 80),
            ("allgather", None),
            ("ps", 5),
            ("allreduce", None),
            ("ps", communicator.size),
            ("ps", 2 * communicator.size),
        ]:
            to = choice.entered().of_table(table, architecture, count)
            rows = relocation.relocate(
                communicator, table.pieces, table.layout, to.layout, "test"
            )
            table.variable.use(table.hold(to, rows))
            read = table.read()
            np.testing.assert_array_equal(
                read.view(np.uint32), whole.view(np.uint32)
            )
    finally:
        relocation._BLOCK_BYTES = 1 << 22


# The two tables of a layer.


def move_a_softmax():
    """Predictions and training while kernel and bias are in other places."""
    outcomes = []
    for is_moved in (False, True):
        keras.utils.clear_session()
        keras.utils.set_random_seed(4)
        softmax = ks.layers.SampledSoftmax(31, 5, seed=2)
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4), softmax]
        )
        with ks.HybridStrategy(architecture="hybrid").scope():
            model.compile("adam", softmax.loss(), run_eagerly=True)
        rng = np.random.default_rng(1)
        x = rng.normal(size=(24, 3)).astype("float32")
        y = rng.integers(0, 31, 24)
        kernel, bias = softmax.tables
        found = []
        for moves in (
            {kernel: ("ps", 3), bias: ("ps", 5)},
            {kernel: "allgather"},
            {kernel: ("ps", 4), bias: "allreduce"},
        ):
            if is_moved:
                ks.moves.move(model, moves)
            model.fit(x, y, batch_size=24, verbose=0, shuffle=False)
            # A few examples go to the weights, many have these come.
            found += [model(part).numpy() for part in (x[:4], x)]
        outcomes.append([*found, *everything(model)])
    for array, other in zip(*outcomes, strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-5, atol=1e-6)


# Architectures that are not moved to, but asked for.


def ask_for_architectures():
    communicator = ks.collectives.current()
    strategy = ks.HybridStrategy(architecture="allreduce")
    inputs = keras.Input((2,), dtype="int32")
    layers = [
        ks.layers.ShardedEmbedding(40, 3, architecture=architecture)
        for architecture in (None, "ps", "allgather")
    ]
    config = layers[1].get_config()
    again = ks.layers.ShardedEmbedding.from_config(config)
    assert again.architecture == "ps"
    layers.append(keras.layers.Embedding(40, 3))
    outputs = keras.layers.Concatenate()([layer(inputs) for layer in layers])
    model = keras.Model(inputs, keras.layers.Flatten()(outputs))
    # Made outside of the scope: spread until it is known what is wanted.
    assert layers[0].table.architecture == "ps"
    with strategy.scope():
        model.compile("sgd", "mse")
        late = ks.layers.ShardedEmbedding(9, 2)
        late.build()
    assert [layer.table.architecture for layer in (*layers[:3], late)] == [
        "allreduce",
        "ps",
        "allgather",
        "allreduce",
    ]
    assert [layer.table.is_sharded for layer in layers[:3]] == [
        False,
        True,
        False,
    ]
    rng = np.random.default_rng(communicator.size)
    x = rng.integers(0, 40, (32, 2))
    model.fit(x, np.ones((32, 24)), batch_size=16, verbose=0, shuffle=False)
    # The same ids touch all of them; each kind counts them in its own way.
    measured = ks.sparsity.measured(model)
    assert len({(v.alpha, v.num_steps) for v in measured}) == 1, measured
    assert measured[0].alpha > 0
    for layer in layers[:3]:
        values = communicator.gather_objects(layer.table.read().tolist())
        assert all(value == values[0] for value in values)
    graph = tf.function(layers[0].table.gather).get_concrete_function(
        tf.TensorSpec([None], tf.int32)
    )
    kinds = {operation.type for operation in graph.graph.get_operations()}
    assert not [k for k in kinds if "Collective" in k or "Horovod" in k]
    for layer in layers[:3]:
        with pytest.raises(tf.errors.InvalidArgumentError, match="40"):
            layer.table.gather(tf.constant([1, 40]))


def ask_for_different_moves():
    rank = ks.collectives.current().rank
    layer = ks.layers.ShardedEmbedding(9, 2)
    model = keras.Sequential([keras.Input((2,)), layer])
    with ks.HybridStrategy(architecture="hybrid").scope():
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"rank 1: .*3") as error:
        ks.moves.repartition(model, {layer.table: 2 + rank})
    assert "Every rank must make the same moves" in str(error.value)
    assert layer.table.layout.num_partitions == 2

    @tf.function
    def function():
        ks.moves.repartition(model, {layer.table: 3})

    with pytest.raises(ValueError, match="inside of a step"):
        function()
    with pytest.raises(ValueError, match="inside of a step"):
        model.distribute_strategy.run(
            lambda: ks.moves.repartition(model, {layer.table: 3})
        )
