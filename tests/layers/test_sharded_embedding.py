"""`ShardedEmbedding` is `Embedding`, on any number of processes."""

import os
import tempfile
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.tables import initial_values
from tests import oracles
from tests.conftest import covering, engines

try:
    from keras.src.layers.core import embedding_test as keras_tests
except ImportError:  # Keras's older wheels have no tests
    keras_tests = None

ROWS, DIM = 11, 3

# Of Keras's own tests, those that do not concern both layers: LoRA and
# quantization, which ShardedEmbedding refuses, and one whose larger part loads
# quantized weights (its other part is `test_loads_what_stock_keras_saves`).
LEFT_OUT = ("lora", "quantize", "quantization", "int4", "int8", "legacy_load")


# Keras's tests were not written for warnings as errors.
@pytest.mark.filterwarnings("default")
class TestAsKerasTestsIt(getattr(keras_tests, "EmbeddingTest", object)):
    """Keras's tests of its Embedding, with ShardedEmbedding in its place."""

    def setUp(self):
        super().setUp()
        self._stock = keras_tests.layers
        replaced = {"Embedding": ks.layers.ShardedEmbedding}
        keras_tests.layers = types.SimpleNamespace(
            **{**vars(self._stock), **replaced}
        )

    def tearDown(self):
        keras_tests.layers = self._stock
        super().tearDown()


for _name in dir(TestAsKerasTestsIt):
    if _name.startswith("test_") and any(w in _name for w in LEFT_OUT):
        setattr(TestAsKerasTestsIt, _name, None)


@pytest.mark.skipif(keras_tests is None, reason="Keras ships no tests")
def test_keras_tests_are_there():
    ran = [n for n in dir(TestAsKerasTestsIt) if n.startswith("test_")]
    ran = [n for n in ran if getattr(TestAsKerasTestsIt, n) is not None]
    assert {"test_embedding_basics", "test_ragged", "test_masking"} <= set(ran)


# One process.


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"]
)
def test_any_integer_dtype(dtype):
    layer = ks.layers.ShardedEmbedding(ROWS, DIM)
    ids = np.array([[0, 10], [3, 3]], dtype)
    rows = layer(ids)
    np.testing.assert_array_equal(rows, layer.get_weights()[0][ids])


@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 1, 3), (0, 3)])
def test_any_rank(shape):
    layer = ks.layers.ShardedEmbedding(ROWS, DIM)
    ids = np.random.default_rng(0).integers(0, ROWS, shape)
    rows = layer(ids)
    assert rows.shape == (*shape, DIM)
    np.testing.assert_array_equal(rows, layer.get_weights()[0][ids])


INITIALIZERS = {
    "uniform": keras.initializers.RandomUniform(seed=5),
    "normal": keras.initializers.RandomNormal(stddev=0.3, seed=5),
    "truncated": keras.initializers.TruncatedNormal(stddev=0.3, seed=5),
    "glorot_uniform": keras.initializers.GlorotUniform(seed=5),
    "he_normal": keras.initializers.HeNormal(seed=5),
    "lecun_normal": keras.initializers.LecunNormal(seed=5),
    "variance_scaling": keras.initializers.VarianceScaling(
        2.0, "fan_out", "untruncated_normal", seed=5
    ),
    "ones": keras.initializers.Ones(),
    "constant": keras.initializers.Constant(0.25),
    "identity": keras.initializers.Identity(),
    "orthogonal": keras.initializers.Orthogonal(seed=5),
}


def copy_of(initializer):
    return type(initializer).from_config(initializer.get_config())


@pytest.mark.parametrize("name", INITIALIZERS)
def test_small_table_starts_as_the_stock_layer(name):
    stock, sharded = (
        layer(ROWS, DIM, embeddings_initializer=copy_of(INITIALIZERS[name]))
        for layer in (keras.layers.Embedding, ks.layers.ShardedEmbedding)
    )
    stock.build()
    sharded.build()
    np.testing.assert_array_equal(
        sharded.get_weights()[0], stock.get_weights()[0]
    )


@pytest.mark.parametrize("name", INITIALIZERS)
@pytest.mark.parametrize("dim", [3, 8, 3000])
def test_large_table_starts_as_the_stock_layer(name, dim, monkeypatch):
    """To the bit, of rows that are drawn in blocks."""
    shape = (401, dim)
    initializer = INITIALIZERS[name]
    stock = keras.ops.convert_to_numpy(copy_of(initializer)(shape))
    monkeypatch.setattr(initial_values, "BLOCK_ELEMENTS", 30 * 8)
    wanted = [np.arange(0, 401, 2), np.arange(1, 401, 2)]
    values = initial_values.draw(copy_of(initializer), shape, "float32", wanted)
    for part, rows in zip(values, wanted, strict=True):
        np.testing.assert_array_equal(part, stock[rows])


@pytest.mark.parametrize("seed", [0, 2**31 - 2, 2**31 - 1, 2**32 - 1])
def test_large_table_takes_the_seeds_of_the_stock_layer(seed, monkeypatch):
    initializer = keras.initializers.RandomUniform(seed=seed)
    stock = keras.ops.convert_to_numpy(initializer((40, 4)))
    monkeypatch.setattr(initial_values, "BLOCK_ELEMENTS", 32)
    (values,) = initial_values.draw(
        initializer, (40, 4), "float32", [np.arange(40)]
    )
    np.testing.assert_array_equal(values, stock)


@pytest.mark.parametrize(
    "name", ["uniform", "glorot_uniform", "he_normal", "variance_scaling"]
)
def test_large_table_has_the_scale_of_the_whole(name, monkeypatch):
    shape = (4000, 8)
    initializer = INITIALIZERS[name]
    stock = keras.ops.convert_to_numpy(copy_of(initializer)(shape))
    monkeypatch.setattr(initial_values, "BLOCK_ELEMENTS", 300 * 8)
    # In float32 they are those of the stock layer.
    (values,) = initial_values.draw(
        copy_of(initializer), shape, "float64", [np.arange(shape[0])]
    )
    values = values.numpy()
    assert values.std() == pytest.approx(stock.std(), rel=0.03)
    assert np.abs(values).max() == pytest.approx(np.abs(stock).max(), rel=0.2)
    # No block is drawn twice.
    assert len(np.unique(values[:, 0])) > 3900


@pytest.mark.parametrize("name", INITIALIZERS)
def test_values_do_not_depend_on_the_partitions(name, monkeypatch):
    shape = (100, 4)
    monkeypatch.setattr(initial_values, "BLOCK_ELEMENTS", 7 * 4)
    draw = initial_values.draw
    (whole,) = draw(
        copy_of(INITIALIZERS[name]), shape, "float32", [np.arange(100)]
    )
    for count in (2, 3, 8):
        rows = [np.arange(p, 100, count) for p in range(count)]
        parts = draw(copy_of(INITIALIZERS[name]), shape, "float32", rows)
        for part, wanted in zip(parts, rows, strict=True):
            np.testing.assert_array_equal(part, np.asarray(whole)[wanted])


def test_seed_generators_draw_anew(monkeypatch):
    monkeypatch.setattr(initial_values, "BLOCK_ELEMENTS", 7 * 4)
    generator = keras.random.SeedGenerator(3)
    initializer = keras.initializers.RandomNormal(seed=generator)
    draws = [
        initial_values.draw(initializer, (50, 4), "float32", [np.arange(50)])[0]
        for _ in range(2)
    ]
    assert not np.array_equal(*draws)


def test_weights_argument():
    whole = np.arange(ROWS * DIM, dtype="float32").reshape(ROWS, DIM)
    layer = ks.layers.ShardedEmbedding(ROWS, DIM, weights=[whole])
    np.testing.assert_array_equal(layer.get_weights()[0], whole)


def test_mask_reaches_the_next_layer():
    inputs = keras.Input((4,), dtype="int32")
    outputs = keras.layers.GlobalAveragePooling1D()(
        ks.layers.ShardedEmbedding(ROWS, DIM, mask_zero=True)(inputs)
    )
    model = keras.Model(inputs, outputs)
    (table,) = model.get_weights()
    pooled = model.predict(np.array([[3, 5, 0, 0]]), verbose=0)
    np.testing.assert_allclose(pooled[0], table[[3, 5]].mean(0), rtol=1e-6)


def test_id_outside_is_an_error_in_one_process():
    layer = ks.layers.ShardedEmbedding(ROWS, DIM, name="words")
    for bad in (-1, ROWS, 2**31 + 3):
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            layer(np.array([1, bad]))
        for part in ("words", str(bad), f"[0, {ROWS})"):
            assert part in str(error.value)


@pytest.mark.parametrize("dtype", ["uint32", "uint64"])
def test_large_unsigned_id_is_an_error(dtype):
    layer = ks.layers.ShardedEmbedding(ROWS, DIM, name="words")
    with pytest.raises(tf.errors.InvalidArgumentError):
        layer(np.array([2**32 - 1 if dtype == "uint32" else 2**32], dtype))


def test_config_round_trip():
    layer = ks.layers.ShardedEmbedding(
        ROWS,
        DIM,
        embeddings_regularizer="l2",
        embeddings_constraint="non_neg",
        mask_zero=True,
        num_partitions=5,
        name="words",
    )
    copy = keras.layers.deserialize(keras.layers.serialize(layer))
    assert isinstance(copy, ks.layers.ShardedEmbedding)
    assert copy.get_config() == layer.get_config()


def test_export_and_shard_embeddings_in_one_process():
    model = pooled_model(ks.layers.ShardedEmbedding, ["a"])
    plain = ks.export(model)
    assert type(plain.layers[1]) is keras.layers.Embedding
    assert "keras_sparsity" not in plain.to_json()
    sharded = ks.shard_embeddings(plain)
    assert type(sharded.layers[1]) is ks.layers.ShardedEmbedding
    ids = np.arange(8).reshape(2, 4)
    expected = model.predict(ids, verbose=0)
    for other in (plain, sharded):
        np.testing.assert_array_equal(other.predict(ids, verbose=0), expected)


# Several processes.


def pooled_model(embedding, names=("a",), **options):
    """Tables of one size, pooled, and a small head."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,), dtype="int32")
    rows = [embedding(ROWS, DIM, name=n, **options)(inputs) for n in names]
    features = rows[0] if len(rows) == 1 else keras.layers.Concatenate()(rows)
    features = keras.layers.GlobalAveragePooling1D()(features)
    head = keras.layers.Dense(1, name="head")
    return keras.Model(inputs, head(features))


def batches(steps=3, batch=8):
    rng = np.random.default_rng(1)
    ids = oracles.zipf_ids(rng, ROWS, (steps * batch, 4))
    return ids, rng.normal(size=(steps * batch, 1)).astype("float32")


def compile_here(model, optimizer="sgd", **options):
    strategy = ks.HybridStrategy()
    with strategy.scope():
        model.compile(optimizer, loss="mse", **options)
    return model


def fit(model, steps=3, start=0):
    x, y = batches(start + steps)
    x, y = x[start * 8 :], y[start * 8 :]
    return model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history


def one_process(optimizer, steps=3, names=("a",), **options):
    model = pooled_model(keras.layers.Embedding, names, **options)
    optimizer = keras.optimizers.get(optimizer)
    oracles.dense_reference(model, optimizer, loss="mse")
    history = fit(model, steps)
    return history, model.get_weights()


def initial_tables():
    """Tables of every initializer, small and of several blocks."""
    original = initial_values.BLOCK_ELEMENTS
    values = {}
    try:
        for block in (original, 4 * DIM):
            initial_values.BLOCK_ELEMENTS = block
            for name, initializer in INITIALIZERS.items():
                for partitions in (None, 3):
                    layer = ks.layers.ShardedEmbedding(
                        ROWS,
                        DIM,
                        embeddings_initializer=copy_of(initializer),
                        num_partitions=partitions,
                    )
                    layer.build()
                    key = (block == original, name)
                    values.setdefault(key, []).append(layer.get_weights()[0])
    finally:
        initial_values.BLOCK_ELEMENTS = original
    return values


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_initial_values_are_those_of_one_process(cluster, engine):
    expected = initial_tables()
    for values in cluster(engine, 2).run(initial_tables):
        for key, tables in values.items():
            for table in tables:
                np.testing.assert_array_equal(table, expected[key][0], str(key))


def unseeded_table():
    keras.utils.set_random_seed(100 + ks.collectives.current().rank)
    layer = ks.layers.ShardedEmbedding(ROWS, DIM)
    layer.build()
    mine = layer.get_weights()[0]
    keras.utils.set_random_seed(100)
    stock = keras.layers.Embedding(ROWS, DIM)
    stock.build()
    return mine, stock.get_weights()[0]


def check_rows():
    """What works on one device only: gathering, masks, ragged, dtypes."""
    table = np.arange(ROWS * DIM, dtype="float32").reshape(ROWS, DIM)
    layer = ks.layers.ShardedEmbedding(
        ROWS, DIM, num_partitions=3, mask_zero=True, weights=table
    )
    rank = ks.collectives.current().rank
    rng = np.random.default_rng(rank)
    for dtype in ("int32", "int64", "uint8"):
        for shape in ((), (4 + rank,), (2, 3), (rank, 3), (2, 1, 2)):
            ids = rng.integers(0, ROWS, shape).astype(dtype)
            np.testing.assert_array_equal(layer(ids), table[ids])
    ids = tf.ragged.constant([[1, 2], [], [rank]])
    rows = layer(ids)
    assert rows.to_list() == [table[i].tolist() for i in ids.to_list()]
    np.testing.assert_array_equal(
        layer.compute_mask(np.array([0, 2])), [False, True]
    )
    # Whole-table views of it.
    np.testing.assert_array_equal(layer.embeddings.numpy(), table)
    np.testing.assert_array_equal(np.asarray(layer.embeddings), table)
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(layer.embeddings), table
    )
    np.testing.assert_array_equal(layer.embeddings * 2 - 1, table * 2 - 1)
    np.testing.assert_array_equal(2 ** -layer.embeddings[1], 2 ** -table[1])
    np.testing.assert_array_equal(table.T @ layer.embeddings, table.T @ table)
    assert layer.count_params() == ROWS * DIM
    layer.set_weights([table + 1])
    np.testing.assert_array_equal(layer.get_weights()[0], table + 1)
    with pytest.raises(ValueError, match="shape"):
        layer.set_weights([table[:-1]])
    # TensorFlow's own ways of saving, which would leave all rows out.
    checkpoint = tf.train.Checkpoint(layer=layer)
    with pytest.raises(ValueError, match="no row of it.*ShardedCheckpoint"):
        checkpoint.write(os.path.join(tempfile.gettempdir(), "refused"))
    model = keras.Sequential([keras.Input((2,)), layer])
    with pytest.raises(ValueError, match="no row of it.*ks.export"):
        model.export(os.path.join(tempfile.gettempdir(), "refused"))


def check_the_whole_table_in_a_step():
    """Not the anchor's value, which has no row; traced and eager."""
    layer = ks.layers.ShardedEmbedding(ROWS, DIM, name="words")
    layer.build()
    strategy = ks.HybridStrategy()
    (table,) = layer.get_weights()
    for use, expected in (
        (lambda: layer.embeddings * 2.0, table * 2.0),
        (lambda: keras.ops.transpose(layer.embeddings), table.T),
    ):
        for step in (use, tf.function(use)):
            np.testing.assert_array_equal(strategy.run(step), expected)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_rows_on_two_processes(cluster, engine):
    group = cluster(engine, 2)
    group.run(check_rows)
    group.run(check_the_whole_table_in_a_step)
    (first, stock), (second, _) = group.run(unseeded_table)
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, stock)


def test_loads_what_stock_keras_saves():
    whole = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype("float32")
    layer = ks.layers.ShardedEmbedding(ROWS, DIM)
    layer.build()
    layer.load_own_variables({"0": whole})
    np.testing.assert_array_equal(layer.get_weights()[0], whole)


def test_weights_of_stock_layers_go_through_their_model(tmp_path):
    def made(kind):
        rows = kind(ROWS, DIM, name="rows")
        return keras.Sequential([keras.Input((2,), dtype="int32"), rows])

    stock, path = made(keras.layers.Embedding), tmp_path / "old.weights.h5"
    stock.save_weights(path)
    sharded = made(ks.layers.ShardedEmbedding)
    with pytest.raises(ValueError, match="ks.shard_embeddings"):
        sharded.load_weights(path)
    fresh = made(keras.layers.Embedding)
    fresh.load_weights(path)
    (found,) = ks.shard_embeddings(fresh).get_weights()
    np.testing.assert_array_equal(found, stock.get_weights()[0])


class Late(keras.Model):
    """Builds a sequential model within its own call; or never calls it."""

    def __init__(self, is_called=True, **kwargs):
        super().__init__(**kwargs)
        self.is_called = is_called
        self.tower = keras.Sequential(
            [
                ks.layers.ShardedEmbedding(ROWS, DIM, name="words"),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        self.out = keras.layers.Dense(1)

    def call(self, ids):
        if self.is_called:
            return self.tower(ids)
        return self.out(keras.ops.cast(ids, "float32"))

    def get_config(self):
        return {**super().get_config(), "is_called": self.is_called}


@pytest.mark.filterwarnings("ignore:`build:UserWarning")
@pytest.mark.parametrize("is_called", [True, False])
def test_built_within_a_models_call_saved_and_loaded(is_called, tmp_path):
    ids = np.arange(6).reshape(3, 2) % ROWS
    model = Late(is_called)
    model.compile("sgd", "mse")
    model.fit(ids, np.ones((3, 1)), verbose=0)
    (words, *_) = model.tower.layers
    assert words.built is is_called
    model.save(tmp_path / "late.keras")
    loaded = keras.models.load_model(
        tmp_path / "late.keras", custom_objects={"Late": Late}
    )
    np.testing.assert_array_equal(
        loaded.predict(ids, verbose=0), model.predict(ids, verbose=0)
    )


def test_a_quantized_policy_is_refused():
    with pytest.raises(ValueError, match="Quantization is not supported"):
        ks.layers.ShardedEmbedding(ROWS, DIM, dtype="int8_from_float32")


def test_an_array_is_assigned_in_a_function():
    layer = ks.layers.ShardedEmbedding(ROWS, DIM)
    layer.build()
    whole = np.ones((ROWS, DIM), "float32")

    @tf.function
    def assign():
        layer.embeddings.assign(whole)

    assign()
    np.testing.assert_array_equal(layer.get_weights()[0], whole)


class TableLayer(keras.layers.Layer):
    """A user's own layer that gathers from a table."""

    def __init__(self):
        super().__init__()
        self.initializer = keras.initializers.get("uniform")

    def build(self, input_shape):
        self.table = ks.ShardedTable(
            ROWS, DIM, 2, initializer=self.initializer, name="own"
        )
        self.rows = self.table.variable

    def call(self, ids):
        return self.table.gather(ids)


@keras.saving.register_keras_serializable(package="tests")
class Subclassed(keras.Model):
    """`pooled_model`, as a class; `embedding` a layer or the user's own."""

    def __init__(self, embedding=None, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding or TableLayer()
        self.pool = keras.layers.GlobalAveragePooling1D()
        self.head = keras.layers.Dense(1)

    def call(self, ids):
        return self.head(self.pool(self.embedding(ids)))


def sequential():
    return keras.Sequential(
        [
            ks.layers.ShardedEmbedding(ROWS, DIM, num_partitions=3),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )


# Without weights before the first batch; only one is worth tracing.
DEFERRED = {
    "sequential": (sequential, False),
    "subclassed": (
        lambda: Subclassed(ks.layers.ShardedEmbedding(ROWS, DIM)),
        True,
    ),
    "own layer": (Subclassed, True),
}


def train_models_of_all_kinds():
    results = {}
    with ks.HybridStrategy().scope():
        model = pooled_model(ks.layers.ShardedEmbedding)
        model.compile("adagrad", loss="mse", run_eagerly=True)
    fit(model)
    results["functional, built inside"] = model.get_weights()
    for name, (make, run_eagerly) in DEFERRED.items():
        keras.utils.set_random_seed(3)
        model = compile_here(make(), "adagrad", run_eagerly=run_eagerly)
        fit(model)
        results[name] = model.get_weights()
        assert model.count_params() == ROWS * DIM + DIM + 1, name
        lines = []
        model.summary(print_fn=lambda x, **_: lines.append(x))  # noqa: B023
        assert any(" 37 (" in line for line in lines), lines
    return results


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_models_of_all_kinds_train(cluster, engine):
    _, expected = one_process("adagrad")
    for results in cluster(engine, 2).run(train_models_of_all_kinds):
        assert len(results) == 4
        for kind, weights in results.items():
            for a, b in zip(weights, expected, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-6, err_msg=kind)


# Saving.


def train_and_save(path, optimizer):
    model = compile_here(
        pooled_model(ks.layers.ShardedEmbedding, ["a", "b"], num_partitions=3),
        optimizer,
        run_eagerly=True,  # many short runs: tracing would take the most time
    )
    fit(model, 2)
    model.save(f"{path}.keras")
    model.save_weights(f"{path}.weights.h5")
    at_saving = model.get_weights(), model.optimizer.state()
    plain = ks.export(model)
    plain_state = [v.numpy() for v in plain.optimizer.variables]
    for a, b in zip(plain_state, at_saving[1], strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(plain.get_weights(), at_saving[0], strict=True):
        np.testing.assert_array_equal(a, b)
    config = plain.to_json()
    if "keras_sparsity" in config or "num_partitions" in config:
        raise AssertionError(config)
    x, _ = batches(1)
    whole = model.predict(x, verbose=0)
    if ks.collectives.current().rank == 0:  # alone
        np.testing.assert_allclose(plain.predict(x, verbose=0), whole, 1e-5)
        plain.save(f"{path}-plain.keras")
    fit(model, 1, start=2)
    return at_saving, model.get_weights()


def load_and_train(path, plain):
    """Weights when loaded, and after the next step; loaded in three ways."""
    results = []
    strategy = ks.HybridStrategy()
    name = f"{path}-plain.keras" if plain else f"{path}.keras"
    with strategy.scope():
        model = keras.models.load_model(name)
    model.run_eagerly = True
    weights, state = model.get_weights(), model.optimizer.state()
    fit(model, 1, start=2)
    results.append((weights, state, model.get_weights()))
    model = keras.models.load_model(name)
    with strategy.scope():
        model.compile(model.optimizer, loss="mse", run_eagerly=True)
    weights, state = model.get_weights(), None
    fit(model, 1, start=2)
    results.append((weights, state, model.get_weights()))
    fresh = pooled_model(ks.layers.ShardedEmbedding, ["a", "b"])
    fresh.load_weights(f"{path}.weights.h5")
    results.append((fresh.get_weights(), None, None))
    return results


def check_loaded(results, at_saving, after):
    for weights, state, trained in results:
        for a, b in zip(weights, at_saving[0], strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(state or (), at_saving[1], strict=bool(state)):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(trained or (), after, strict=bool(trained)):
            np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_saved_on_two_loaded_on_one_and_back(cluster, engine, tmp_path):
    group = cluster(engine, 2)
    path = str(tmp_path / "two")
    saved = group.run(train_and_save, path, "adam")
    at_saving, after = saved[0]
    check_loaded(load_and_train(path, False), at_saving, after)
    for results in group.run(load_and_train, path, True):
        check_loaded(results, at_saving, after)
    # From one process to two.
    path = str(tmp_path / "one")
    at_saving, after = train_and_save(path, "adam")
    for results in group.run(load_and_train, path, False):
        check_loaded(results, at_saving, after)


# Loss scaling.


def call_before_fit():
    """Of a compiled model, called outside of any strategy: outputs."""
    model = compile_here(pooled_model(ks.layers.ShardedEmbedding))
    x, y = batches(1)
    called = model(x, training=True).numpy()
    expected = model.predict(x, verbose=0)
    with pytest.raises(ValueError, match="strategy.run"):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True))
        tape.gradient(loss, model.trainable_variables)
    hidden = keras.Input((4,), dtype="int32")
    bag = ks.layers.ShardedEmbeddingBag(ROWS, DIM)
    softmax = ks.layers.SampledSoftmax(20, 5)
    sampled = keras.Model(hidden, softmax(bag(hidden)))
    with ks.HybridStrategy().scope():
        sampled.compile("sgd", softmax.loss())
    sampled(x, training=True)
    sampled.fit(x, np.abs(y.astype("int32")), verbose=0)
    fit(model)
    return called, expected


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_model_is_called_in_training_before_fit(cluster, engine):
    for called, expected in cluster(engine, 2).run(call_before_fit):
        np.testing.assert_allclose(called, expected, rtol=1e-6)


# Regularizers and constraints.


class OfBusiestColumn(keras.regularizers.L2):
    def __call__(self, x):
        return 0.1 * keras.ops.max(keras.ops.sum(keras.ops.square(x), axis=0))


class OfColumns(keras.constraints.MaxNorm):
    def __call__(self, w):
        return w / keras.ops.maximum(1.0, keras.ops.norm(w, axis=0) / 0.3)


class Positive(keras.constraints.NonNeg):
    def __call__(self, w):
        return keras.ops.abs(w) - keras.ops.min(w)


class HasAnAxis(keras.constraints.Constraint):
    axis = 1

    def __call__(self, w):
        return w - keras.ops.mean(w, axis=0)


class Halved(keras.regularizers.L2):
    """Adds up as L2 does, which it is."""

    def __init__(self, l2):
        super().__init__(l2 / 2)


OF_THE_WHOLE = {
    "embeddings_regularizer": [
        OfBusiestColumn(0.1),
        keras.regularizers.OrthogonalRegularizer(0.1),
        lambda x: 0.1 * keras.ops.max(x),
    ],
    "embeddings_constraint": [
        OfColumns(0.3, axis=1),
        Positive(),
        HasAnAxis(),
        keras.constraints.MaxNorm(0.3),
        lambda w: w / 2,
    ],
}


def regularize_and_constrain():
    """Errors of what needs a whole table, and weights trained without one."""
    errors = []
    for name, values in OF_THE_WHOLE.items():
        for value in values:
            with pytest.raises(ValueError, match="architecture=") as error:
                compile_here(
                    pooled_model(ks.layers.ShardedEmbedding, **{name: value})
                )
            errors.append(str(error.value))
    spread = pooled_model(ks.layers.ShardedEmbedding)
    compile_here(spread, keras.optimizers.SGD(0.5))
    variable = spread.layers[1].table.variable
    for attribute in ("regularizer", "constraint"):
        for value in OF_THE_WHOLE[f"embeddings_{attribute}"]:
            with pytest.raises(ValueError, match="architecture="):
                setattr(variable, attribute, value)
    variable.regularizer = Halved(0.2)
    variable.constraint = keras.constraints.MaxNorm(0.03, axis=1)
    fit(spread)
    whole = pooled_model(
        ks.layers.ShardedEmbedding,
        embeddings_regularizer=OfBusiestColumn(0.1),
        embeddings_constraint=OfColumns(0.3, axis=1),
        architecture="allreduce",
    )
    compile_here(whole, keras.optimizers.SGD(0.5))
    fit(whole)
    return errors, [model.get_weights() for model in (spread, whole)]


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_what_needs_the_whole_table_is_refused(cluster, engine):
    expected = [
        one_process(
            keras.optimizers.SGD(0.5),
            embeddings_regularizer=Halved(0.2),
            embeddings_constraint=keras.constraints.MaxNorm(0.03, axis=1),
        )[1],
        one_process(
            keras.optimizers.SGD(0.5),
            embeddings_regularizer=OfBusiestColumn(0.1),
            embeddings_constraint=OfColumns(0.3, axis=1),
        )[1],
    ]
    for errors, trained in cluster(engine, 2).run(regularize_and_constrain):
        assert len(errors) == 8
        for ours, theirs in zip(trained, expected, strict=True):
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def overflow_in_one_row():
    """A gradient that overflows in row 1 alone, which one rank owns."""
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential(
        [keras.Input((1,), dtype="int32"), ks.layers.ShardedEmbedding(4, 2)]
    )
    compile_here(model, keras.optimizers.Adam(0.1, clipnorm=1.0))
    before = model.get_weights()[0]
    seen = []
    for target in (1.0, 1e9, 1.0):
        targets = np.array([[1.0], [target]])[..., None] * np.ones(2)
        model.train_on_batch(np.array([[0], [1]]), targets)
        seen.append(
            (
                int(model.optimizer.iterations),
                float(model.optimizer.inner_optimizer.dynamic_scale),
                float(np.abs(model.get_weights()[0] - before).max()),
            )
        )
    return seen


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_overflow_on_one_rank_skips_on_all(cluster, engine):
    first, second = cluster(engine, 2).run(overflow_in_one_row)
    assert first == second
    iterations, scales, moved = zip(*first, strict=True)
    assert iterations == (1, 1, 2)
    assert scales == (2.0**15, 2.0**14, 2.0**14)
    assert 0 < moved[0] == moved[1] < moved[2]


# Ids outside of the table.


def train_on_bad_id(bad, position):
    """The messages that a bad id in one rank's part gives on this rank."""
    model = pooled_model(
        ks.layers.ShardedEmbedding, ["words"], num_partitions=3
    )
    compile_here(model)
    x, y = batches(2)
    x[8 + position, 2] = bad
    messages = []
    for call in (
        lambda: model.fit(x, y, batch_size=8, shuffle=False, verbose=0),
        lambda: model.predict(x, batch_size=8, verbose=0),
        lambda: model.layers[1](
            x[8:] if position // 4 == ks.collectives.current().rank else x[:8]
        ),
    ):
        try:
            call()
        except tf.errors.InvalidArgumentError as error:
            messages.append(str(error))
    # The ranks go on together afterwards.
    x[8 + position, 2] = 0
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return messages


@pytest.mark.parametrize(
    ("engine", "bad", "position"),
    covering(
        [
            (engine, *case)
            for engine in ("native", "horovod")
            for case in ((-1, 0), (ROWS, 7))
        ],
        [("horovod", ROWS, 7)],
    ),
)
def test_id_outside_is_an_error_on_every_rank(cluster, engine, bad, position):
    for messages in cluster(engine, 2).run(train_on_bad_id, bad, position):
        assert len(messages) == 3
        for message in messages:
            for part in ("words", str(bad), f"[0, {ROWS})"):
                assert part in message, message
