"""Ordinary `Embedding`s whose rows are spread, against stock Keras."""

import contextlib
import json
import os
import zipfile
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.callbacks import auto_architecture
from keras_sparsity.conversion import saving
from keras_sparsity.layers import ordinary
from keras_sparsity.placement import choice
from tests.checkpoint_functions import Peak
from tests.cluster import Cluster
from tests.conftest import engines
from tests.logged import with_messages_of

ROWS, DIM = 13, 3


@keras.saving.register_keras_serializable(package="tests")
class Items(keras.layers.Layer):
    """Makes its table when it is built."""

    def build(self, shape):
        self.table = keras.layers.Embedding(ROWS, DIM)
        self.table.build(shape)

    def call(self, ids):
        return self.table(ids)


@keras.saving.register_keras_serializable(package="tests")
class Recommender(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.users = keras.layers.Embedding(
            ROWS, DIM, mask_zero=True, embeddings_regularizer="l2"
        )
        self.inner = Items()
        self.last = keras.layers.Dense(1)

    def call(self, ids):
        return self.last(self.users(ids[:, 0]) * self.inner(ids[:, 1]))

    @property
    def items(self):
        return self.inner.table


def examples():
    rng = np.random.default_rng(4)
    ids = rng.integers(ROWS, size=(24, 2)).astype("int32")
    return ids, rng.normal(size=(24, 1)).astype("float32")


def seeded(make):
    keras.utils.clear_session()
    keras.utils.set_random_seed(8)
    return make()


def trained(model, strategy=None, **options):
    with strategy.scope() if strategy else contextlib.nullcontext():
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-4), "mse")
    ids, y = examples()
    model.fit(ids, y, batch_size=8, shuffle=False, verbose=0, **options)
    return model


def servers():
    return ks.HybridStrategy(architecture="ps")


def layers_of(model):
    return [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.Embedding)
    ]


def assert_is_spread(layer):
    """Its class is the user's, and this rank has its part of the rows."""
    assert type(layer) is keras.layers.Embedding
    table = layer.embeddings.table
    size = ks.collectives.current().size
    assert table.is_sharded
    assert sum(p.num_rows for p in table.pieces) <= -(-ROWS // size)


# As a layer and a weight.


def use():
    model = trained(seeded(Recommender), servers())
    for layer in (model.users, model.items):
        assert_is_spread(layer)
    assert model.users.count_params() == ROWS * DIM
    assert model.count_params() == 2 * ROWS * DIM + DIM + 1
    lines = []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    assert str(ROWS * DIM) in "".join(lines)
    (whole,) = model.items.get_weights()
    table = whole.copy()

    for ids in (
        np.array([[0, 12], [5, 5]]),
        np.array([-1, 3, -ROWS], "int64"),
        np.array([7, 250 % ROWS], "uint8"),
        np.array([1.0, 2.0], "float32"),
    ):
        rows = model.items(ids)
        np.testing.assert_array_equal(rows, table[ids.astype("int64")])
    ragged = tf.ragged.constant([[1, 2], [], [12]])
    rows = model.items(ragged)
    np.testing.assert_array_equal(rows.flat_values, table[[1, 2, 12]])
    np.testing.assert_array_equal(rows.row_lengths(), [2, 0, 1])
    x = np.ones((2, DIM), "float32")
    whole = keras.ops.matmul(x, keras.ops.transpose(model.items.embeddings))
    np.testing.assert_allclose(whole, x @ table.T, rtol=1e-6)
    taken = keras.ops.take(model.items.embeddings, [3, 1], axis=0)
    np.testing.assert_array_equal(taken, table[[3, 1]])

    model.items.set_weights([table + 1])
    np.testing.assert_array_equal(model.items(np.array([2]))[0], table[2] + 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must lie in"):
        model.items(np.array([ROWS]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="must lie in"):
        model.predict(np.full((4, 2), -ROWS - 1), verbose=0)
    model.items.set_weights([table])
    model.items.enable_lora(1)
    np.testing.assert_array_equal(model.items(np.array([2, 4])), table[[2, 4]])
    return model.users.get_weights()[0], table


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_a_layer_stays_what_it_is(engine, cluster):
    stock = trained(seeded(Recommender))
    expected = [layer.get_weights()[0] for layer in (stock.users, stock.items)]
    for found in cluster(engine, 2).run(use):
        for array, of_stock in zip(found, expected, strict=True):
            # Stock Keras moves by a sum of slices, here by the dense gradient.
            assert array.shape == of_stock.shape
            np.testing.assert_allclose(array, of_stock, atol=2e-2)


# Files.


def write(directory):
    path = os.path.join(directory, "{epoch}.keras")
    steps = ks.callbacks.ShardedCheckpoint(os.path.join(directory, "steps"))
    model = trained(
        seeded(Recommender),
        servers(),
        callbacks=[keras.callbacks.ModelCheckpoint(path), steps],
    )
    ids, _ = examples()
    weights, found = model.get_weights(), model.predict(ids, verbose=0)
    model.save_weights(os.path.join(directory, "only.weights.h5"))
    state = model.optimizer.state()

    plain = ks.export(model)
    assert not saving.tables_of(plain)
    assert all(ordinary.lookup_of(layer) is None for layer in layers_of(plain))
    np.testing.assert_allclose(plain.predict(ids, verbose=0), found, rtol=1e-5)
    for made, value in zip(plain.optimizer.variables, state, strict=True):
        np.testing.assert_array_equal(made, value)
    sharded = ks.shard_embeddings(model)
    assert {type(layer) for layer in layers_of(sharded)} == {
        ks.layers.ShardedEmbedding
    }
    np.testing.assert_array_equal(sharded.get_weights()[0], weights[0])

    for layer in layers_of(model):
        layer.set_weights([np.zeros((ROWS, DIM))])
    steps.restore(model)
    for value, before in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(value, before)
    for layer in layers_of(model):
        layer.set_weights([np.zeros((ROWS, DIM))])
    model.load_weights(os.path.join(directory, "only.weights.h5"))
    np.testing.assert_array_equal(model.predict(ids, verbose=0), found)
    with servers().scope():
        loaded = keras.models.load_model(os.path.join(directory, "1.keras"))
    for layer in layers_of(loaded):
        assert_is_spread(layer)
    np.testing.assert_array_equal(loaded.predict(ids, verbose=0), found)
    return weights, found


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_files_are_those_of_stock_keras(engine, cluster, tmp_path):
    ids, _ = examples()
    ranks = cluster(engine, 2).run(write, str(tmp_path))
    with zipfile.ZipFile(tmp_path / "1.keras") as file:
        config = json.loads(file.read("config.json"))
    config.pop("compile_config")
    assert "keras_sparsity" not in json.dumps(config)
    model = keras.models.load_model(tmp_path / "1.keras", compile=False)
    for weights, found in ranks:
        for value, of_rank in zip(model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(value, of_rank)
        np.testing.assert_allclose(model(ids), found, rtol=1e-5)
    # The state of two ranks in one process, where layers stay whole.
    alone = trained(seeded(Recommender), ks.HybridStrategy())
    checkpoint = ks.callbacks.ShardedCheckpoint(str(tmp_path / "steps"))
    checkpoint.restore(alone)
    assert not saving.tables_of(alone)
    np.testing.assert_array_equal(alone.get_weights()[0], ranks[0][0][0])


# What is spread, and what is not.


class Scaled(keras.layers.Embedding):
    """With a `call` of its own."""

    def call(self, ids):
        return 2.0 * super().call(ids)


def functional(layer):
    ids = keras.Input((2,), dtype="int32")
    rows = keras.layers.Flatten()(layer(ids))
    return keras.Model(ids, keras.layers.Dense(1)(rows))


def sequential(layer):
    return keras.Sequential(
        [layer, keras.layers.Flatten(), keras.layers.Dense(1)]
    )


@with_messages_of("keras_sparsity.training.embeddings")
def architectures(told):
    """Architectures of models that are made in several ways, and warnings."""
    found, optimizers = {}, [keras.optimizers.Adam]

    def placed(name, layer, make=functional, architecture="ps", in_scope=False):
        strategy = ks.HybridStrategy(architecture=architecture)
        seeded(lambda: None)
        with strategy.scope() if in_scope else contextlib.nullcontext():
            model = make(layer())
        for _ in range(2):  # which is told once
            with strategy.scope():
                model.compile(optimizers[-1](0.01), "mse")
        if not model.built:
            model.train_on_batch(*examples())
        (layer,) = layers_of(model)
        table = getattr(layer.embeddings, "table", None)
        found[name] = table and table.architecture

    def plain(**options):
        return keras.layers.Embedding(ROWS, DIM, **options)

    placed("functional", plain)
    placed("in the scope", plain, in_scope=True)
    placed("sequential, built late", plain, sequential)
    placed("hybrid", plain, architecture="hybrid")
    placed("auto", plain, architecture="auto")
    with mock.patch.object(choice, "_WHOLE_BYTES", ROWS * DIM * 4 - 1):
        placed("auto, large", plain, architecture="auto")
    placed("own call", lambda: Scaled(ROWS, DIM, name="scaled"))
    placed("lora", lambda: plain(lora_rank=1, name="adapted"))
    placed(
        "regularized",
        lambda: plain(
            embeddings_regularizer=keras.regularizers.OrthogonalRegularizer(),
            name="orthogonal",
        ),
    )
    optimizers.append(keras.optimizers.Adafactor)
    placed("whole rule", lambda: plain(name="whole"))
    placed("whole rule, late", plain, in_scope=True)
    return found, told


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_what_is_spread(engine, cluster):
    ranks = cluster(engine, 2).run(architectures)
    for found, told in ranks:
        assert found == {
            "functional": "ps",
            "in the scope": "ps",
            "sequential, built late": "ps",
            "hybrid": None,
            "auto": None,
            "auto, large": "ps",
            "own call": None,
            "lora": None,
            "regularized": None,
            "whole rule": None,
            "whole rule, late": "allgather",
        }
        assert told == [] or told is ranks[0][1]
    reasons = [
        "'scaled', 0.000156 MB, stays whole on every process: its class "
        "Scaled has a `call` or `build` of its own.",
        "'adapted', 0.000156 MB, stays whole on every process: it uses LoRA.",
        "'orthogonal', 0.000156 MB, stays whole on every process: its "
        "regularizer or its constraint needs the whole of it.",
        "'whole', 0.000156 MB, stays whole on every process: the rule of "
        "Adafactor needs the whole of it.",
    ]
    assert ranks[0][1] == [f"The table of {reason}" for reason in reasons]


def find(architecture):
    """Weights after 24 steps, and where the items are, before and after."""
    strategy = ks.HybridStrategy(architecture=architecture)
    model = seeded(Recommender)
    with strategy.scope():
        model.compile(keras.optimizers.Adam(0.01, epsilon=1e-4), "mse")
    costs, found = [], []

    def best(of_each, now):
        costs.append(of_each)
        return "ps"

    def note(epoch, logs):
        table = getattr(model.items.embeddings, "table", None)
        found.append(table and table.architecture)

    ids, y = examples()
    with (
        mock.patch.object(auto_architecture, "_best", best),
        mock.patch.object(
            auto_architecture.AutoArchitecture, "_pays", lambda *_: True
        ),
    ):
        model.fit(
            ids,
            y,
            batch_size=8,
            epochs=8,
            shuffle=False,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=note)],
        )
    slots = [v.shape for v in model.optimizer.inner_optimizer.variables]
    return model.get_weights(), found, [sorted(c) for c in costs], slots


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_counted_bytes_may_spread_a_small_one(engine, cluster):
    processes = cluster(engine, 2)
    expected = processes.run(find, "hybrid")[0][0]
    for weights, found, costs, slots in processes.run(find, "auto"):
        assert found == [None] * 5 + ["ps"] * 3  # after 16 steps
        assert ["allgather", "allreduce", "ps"] in costs
        # Its slots have moved along: each rank has half of the rows.
        assert slots.count((ROWS, DIM)) == 2  # of the users
        assert {(7, DIM), (6, DIM)} & set(slots)
        for value, of_hybrid in zip(weights, expected, strict=True):
            np.testing.assert_allclose(value, of_hybrid, atol=1e-6)


def tied():
    """Two layers that share one weight."""
    first = keras.layers.Embedding(ROWS, DIM)
    second = keras.layers.Embedding(ROWS, DIM)
    first.build()
    second._embeddings, second.built = first._embeddings, True
    ids = keras.Input((2,), dtype="int32")
    rows = first(ids[:, :1]) + second(ids[:, 1:])
    return keras.Model(ids, keras.layers.Dense(1)(rows))


def train_tied():
    model = trained(seeded(tied), servers())
    first, second = layers_of(model)
    assert first.embeddings is second.embeddings
    for layer in (first, second):
        assert ordinary.lookup_of(layer).table is first.embeddings.table
    return first.get_weights()[0]


def test_two_layers_of_one_weight_are_one_table(cluster):
    before = layers_of(seeded(tied))[0].get_weights()[0]
    (weights, other) = cluster("native", 2).run(train_tied)
    np.testing.assert_array_equal(weights, other)
    # Three steps of Adam: each element of a row by at most 0.01.
    moved = np.abs(weights - before)
    assert 0.01 < moved.max() < 0.0301


def growth_of_large(optimizer):
    """MiB of a rank's rows, and by how much building a model grows it."""
    layer = keras.layers.Embedding(2_000_000, 64)
    model = keras.Sequential([layer, keras.layers.Flatten()])
    with servers().scope():
        model.compile(optimizer, "mse")
    with Peak() as growth:
        model.fit(np.zeros((4, 1)), np.ones((4, 64)), verbose=0)
    (rows,) = layer.embeddings.table.pieces
    return rows.num_rows * 64 * 4 / 2**20, growth.mebibytes


@pytest.mark.parametrize(
    ("optimizer", "num_slots"), [("sgd", 0), ("adagrad", 1), ("adam", 2)]
)
def test_a_rank_stores_its_rows_and_slots_once(optimizer, num_slots):
    # Of its own: what other tests leave in a process's memory counts, too.
    processes = Cluster(2, "native")
    try:
        found = processes.run(growth_of_large, optimizer)
    finally:
        processes.stop()
    for rows, growth in found:
        assert rows > 240
        # Blocks of the table, and the step, are 74 to 181 MiB; a copy of the
        # rows, which TensorFlow's allocator would keep, comes on top.
        assert growth - (1 + num_slots) * rows < rows, found
