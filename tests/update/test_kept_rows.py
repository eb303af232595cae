"""Rows that zero gradients move are updated when they are read."""

import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity._tf.current_variable import keeper_of
from keras_sparsity.tables import whole
from keras_sparsity.update import kept_rows, rules, step_sums
from tests import kept_functions
from tests.conftest import covering, engines

ROWS, DIM = 60, 3
RULES = {
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {"weight_decay": 0.1}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "nadam": ("Nadam", {}),
    "lion": ("Lion", {}),
    "decayed lion": ("Lion", {"weight_decay": 0.1}),
    "ftrl": ("Ftrl", {"l1_regularization_strength": 0.02}),
    "momentum": ("SGD", {"momentum": 0.9}),
}


@pytest.fixture(autouse=True)
def kept_however_small(monkeypatch):
    monkeypatch.setattr(rules, "_SMALL_ELEMENTS", 0)


def made(name, **more):
    kind, options = RULES[name]
    return getattr(keras.optimizers, kind)(**options, **more)


def start(dtype="float32"):
    return np.random.default_rng(3).normal(size=(ROWS, DIM)).astype(dtype)


def problem(num_steps, dtype="float32", rare=500):
    """Ids by Zipf, of which the last ones come once in `rare` steps.

    A third of the rows never come.
    """
    rng = np.random.default_rng(4)
    for step in range(num_steps):
        ids = np.minimum(rng.zipf(1.2, 8) - 1, ROWS // 3)
        if step % rare == rare - 1:
            ids[:4] = np.arange(4) + ROWS // 3
        yield ids, rng.normal(size=(8, DIM)).astype(dtype)


def rate(step, num_steps):
    return 0.02 * (1 + np.cos(np.pi * step / num_steps)) + 1e-3


class Stock:
    """Stock Keras, fed the dense gradient."""

    def __init__(self, optimizer, dtype="float32"):
        self.optimizer = optimizer
        self.weights = keras.Variable(start(dtype), dtype=dtype)
        optimizer.build([self.weights])

        @tf.function
        def step(gradient):
            optimizer.apply([gradient])

        self._step = step

    def step(self, ids, values):
        dense = np.zeros(self.weights.shape, self.weights.dtype)
        np.add.at(dense, ids, values)
        self._step(tf.constant(dense))

    def state(self):
        return [v.numpy() for v in (self.weights, *self.optimizer.variables)]


class Kept:
    """A table of this package, in a training loop."""

    def __init__(self, optimizer, dtype="float32", mode="exact"):
        self.table = ks.ShardedTable(ROWS, DIM, dtype=dtype)
        self.table.assign(start(dtype))
        self.optimizer = ks.HybridOptimizer(optimizer, mode)
        self.optimizer.build([self.table.variable])
        self.retrace()

    @property
    def keeper(self):
        return keeper_of(self.table.variable.value)

    def retrace(self):
        self.step = tf.function(self._step)

    def _step(self, ids, values):
        variables = [self.table.variable]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.table.gather(ids) * values)
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def state(self):
        return [v.numpy() for v in (self.table.variable, *self.variables)]

    @property
    def variables(self):
        return self.optimizer.variables


def train(num_steps, *trained, dtype="float32", each=lambda step: None):
    for step, (ids, values) in enumerate(problem(num_steps, dtype)):
        each(step)
        for one in trained:
            one.optimizer.learning_rate = rate(step, num_steps)
            one.step(ids, values)


def assert_same(kept, stock, rtol=2e-5, atol=2e-6):
    for a, b in zip(kept.state(), stock.state(), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


# The clock is one for all rules; two kinds of sums are of its steps.
@pytest.mark.parametrize(
    "name",
    [
        *("adamw", "decayed lion"),
        *(
            pytest.param(name, marks=pytest.mark.all_cells)
            for name in ("adam", "nadam", "ftrl")
        ),
    ],
)
def test_clock_that_is_full_begins_anew(name, monkeypatch):
    monkeypatch.setattr(step_sums, "_FEWEST_STEPS", 1)
    monkeypatch.setattr(step_sums, "_MOST_STEPS", 1)
    stock, kept = Stock(made(name)), Kept(made(name))
    train(1500, stock, kept)
    assert kept.keeper.sums.capacity < 1000
    assert_same(kept, stock)


@pytest.mark.parametrize(
    "num_rows",
    [
        pytest.param(1, marks=pytest.mark.all_cells),
        *(7, 20),  # the last block is smaller, and is not
        pytest.param(ROWS - 1, marks=pytest.mark.all_cells),
    ],
)
def test_rows_are_brought_up_to_date_in_blocks(num_rows, monkeypatch):
    monkeypatch.setattr(kept_rows, "_BLOCK_BYTES", 4 * DIM * num_rows)
    stock, kept = Stock(made("adamw")), Kept(made("adamw"))
    read = tf.function(lambda: whole.tensor(kept.table))
    for _ in range(3):
        train(20, stock, kept)
        np.testing.assert_allclose(
            read(), stock.weights.numpy(), rtol=2e-5, atol=2e-6
        )
        train(20, stock, kept)
        assert_same(kept, stock)


def test_decay_to_nothing():
    """Products of decays fall below the smallest float64."""
    options = {"weight_decay": 20.0, "momentum": 0.5}
    stock = Stock(keras.optimizers.SGD(0.03, **options))
    kept = Kept(keras.optimizers.SGD(0.03, **options))
    train(1500, stock, kept)
    assert_same(kept, stock)


def test_decay_of_all_there_is_in_one_step():
    options = {"weight_decay": 2.0, "momentum": 0.5}
    stock = Stock(keras.optimizers.SGD(0.5, **options))
    kept = Kept(keras.optimizers.SGD(0.5, **options))
    for ids, values in problem(40):
        for one in (stock, kept):
            one.step(ids, values)
    assert_same(kept, stock)


def test_rows_are_read_without_a_change():
    """An evaluation leaves training as it was, to the bit."""
    plain, read = Kept(made("adam")), Kept(made("adam"))
    train(
        300,
        plain,
        read,
        each=lambda step: read.table.gather(tf.range(ROWS)),
    )
    for a, b in zip(plain.state(), read.state(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("is_step", [True, False])
def test_a_traced_function_writes_between_pull_and_update(is_step):
    stock, kept = Stock(made("adam")), Kept(made("adam"))
    train(20, stock, kept)
    ids, values = tf.constant([0, 1, 2]), tf.ones([3, DIM])
    rows = tf.constant([[7.0] * DIM] * 3)

    @tf.function
    def write():
        if is_step:
            kept._step(ids, 3 * values)
        else:
            slices = tf.IndexedSlices(rows, ids)
            kept.table.variable.value.scatter_update(slices)

    # Before: the step does not know what it does.
    traced = write.get_concrete_function()

    @tf.function
    def step():
        variables = [kept.table.variable]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kept.table.gather(ids) * values)
        gradients = tape.gradient(loss, variables)
        traced()
        kept.optimizer.apply(gradients, variables)

    for _ in range(3):
        step()
        if is_step:
            stock.step(ids, 3 * values)
        else:
            value = stock.weights.numpy()
            value[:3] = rows
            stock.weights.assign(value)
        stock.step(ids, values)
        assert_same(kept, stock)


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.8, "centered": True}, {"use_ema": True}]
)
def test_all_is_read_between_pull_and_update(options):
    """Slots that the rows do not depend on, too, are then up to date."""
    stock, kept = (
        kind(keras.optimizers.RMSprop(**options)) for kind in (Stock, Kept)
    )
    ids, values = tf.constant([0, 1, 2, ROWS // 3]), tf.ones([4, DIM])

    @tf.function
    def step():
        variables = [kept.table.variable]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kept.table.gather(ids) * values)
        gradients = tape.gradient(loss, variables)
        whole.tensor(kept.table)
        kept.optimizer.apply(gradients, variables)

    for _ in range(3):
        train(20, stock, kept)
        step()
        stock.step(ids, values)
        assert_same(kept, stock)


def test_reading_and_setting_anything_between_steps():
    stock, kept = Stock(made("adamw")), Kept(made("adamw"))
    scale = np.float32(0.5)

    def each(step):
        if step == 50:  # weights, whole
            value = stock.weights.numpy() * scale
            stock.weights.assign(value)
            kept.table.assign(value)
        if step == 100:  # a slot, in place
            for one in (stock, kept):
                momentum = one.optimizer.variables[2]
                momentum.assign(momentum.numpy() * scale)
        if step == 150:  # some rows
            rows = tf.constant([0, 1, ROWS - 1])
            values = tf.ones([3, DIM])
            for variable in (stock.weights, kept.table.variable):
                variable.value.scatter_update(tf.IndexedSlices(values, rows))
        if step == 200:  # all state
            state = [v * scale for v in kept.optimizer.state()[2:]]
            iterations = np.array(7)
            learning_rate = np.float32(0.01)
            kept.optimizer.set_weights([iterations, learning_rate, *state])
            for variable, value in zip(
                stock.optimizer.variables,
                [iterations, learning_rate, *state],
                strict=True,
            ):
                variable.assign(value)
        if step % 60 == 30:
            assert_same(kept, stock)

    train(300, stock, kept, each=each)
    assert_same(kept, stock)


@pytest.mark.parametrize("attribute", ["beta_1", "weight_decay", "epsilon"])
def test_another_hyperparameter(attribute):
    """Functions of before and of after may even take turns."""
    stock, kept = Stock(made("adamw")), Kept(made("adamw"))
    values = {"beta_1": 0.8, "weight_decay": 0.3, "epsilon": 1e-3}
    train(50, stock, kept)
    before = stock._step, kept.step
    for one in (stock, kept):
        setattr(one.optimizer, attribute, values[attribute])
    kept.retrace()
    after = tf.function(lambda g: stock.optimizer.apply([g])), kept.step

    def each(step):
        stock._step, kept.step = before if step // 20 % 2 else after

    train(100, stock, kept, each=each)
    assert_same(kept, stock)


def test_from_exact_to_lazy_and_back():
    kept, stock = Kept(made("adam")), Stock(made("adam"))
    train(50, stock, kept)
    kept.optimizer.sparse_updates = "lazy"
    kept.retrace()
    before = kept.table.gather(tf.range(ROWS)).numpy()
    kept.step(np.array([0]), np.ones((1, DIM), "float32"))
    np.testing.assert_array_equal(kept.table.read()[1:], before[1:])


@pytest.mark.parametrize(
    "options", [{}, {"use_ema": True}, {"gradient_accumulation_steps": 2}]
)
def test_lazy_updates_of_all_rows_are_told(options, caplog):
    kept = Kept(made("adam", **options), mode="lazy")
    assert caplog.text.count("Each step updates all") == len(options)
    assert all(f"`{option}`" in caplog.text for option in options)
    is_by_rows = kept.optimizer.updates_rows_of(kept.table.variable)
    assert is_by_rows == (not options)


def test_function_that_was_traced_before_the_optimizer():
    table = ks.ShardedTable(ROWS, DIM)
    table.assign(start())
    read = tf.function(lambda: table.gather(tf.range(ROWS)))
    read()
    kept, stock = Kept(made("adam")), Stock(made("adam"))
    kept.table = table
    kept.optimizer = ks.HybridOptimizer(made("adam"))
    kept.optimizer.build([table.variable])
    train(50, stock, kept)
    np.testing.assert_allclose(
        read(), stock.weights.numpy(), rtol=2e-5, atol=2e-6
    )
    assert_same(kept, stock)


def test_functions_of_all_kinds_of_readers():
    stock, kept = Stock(made("adam")), Kept(made("adam"))
    table, ids = kept.table, np.array([[5, 5], [ROWS // 3, 0]])
    readers = {
        "rows": lambda: table.gather(ids),
        "value": lambda: tf.gather(table.variable.value + 0.0, ids),
        "tensor": lambda: tf.gather(tf.convert_to_tensor(table.variable), ids),
        "keras": lambda: keras.ops.take(table.variable, ids, axis=0),
        "whole": lambda: tf.gather(whole.tensor(table), ids),
        "nd": lambda: tf.gather_nd(table.variable.value, ids[..., None]),
        "lookup": lambda: tf.nn.embedding_lookup(table.variable.value, ids),
        "item": lambda: tf.gather(table.variable[:], ids),
    }
    traced = {kind: tf.function(read) for kind, read in readers.items()}
    for round_ in range(3):
        train(40, stock, kept)
        for kind in readers:
            train(3, stock, kept)
            read = (traced if round_ % 2 else readers)[kind]
            np.testing.assert_allclose(
                read(),
                stock.weights.numpy()[ids],
                rtol=2e-5,
                atol=2e-6,
                err_msg=kind,
            )


def test_optimizer_that_has_trained_before():
    """Its slots are not zero."""
    stock = Stock(made("adam"))
    train(30, stock)
    inner = made("adam")
    table = ks.ShardedTable(ROWS, DIM)
    inner.build([table.variable])
    kept = Kept(made("adam"))
    kept.table, kept.optimizer = table, ks.HybridOptimizer(inner)
    for variable, value in zip(
        (table.variable, *inner.variables), stock.state(), strict=True
    ):
        variable.assign(value)
    kept.optimizer.build([table.variable])
    assert kept.keeper is not None
    train(100, stock, kept)
    assert_same(kept, stock)


def test_second_optimizer_of_a_table():
    stock, first = Stock(made("adam")), Kept(made("adam"))
    train(30, stock, first)
    second = Kept(made("adam"))
    second.table, second.optimizer = (
        first.table,
        ks.HybridOptimizer(made("momentum")),
    )
    second.optimizer.build([first.table.variable])
    other = Stock(made("momentum"))
    other.weights = stock.weights
    other.optimizer = made("momentum")
    other.optimizer.build([stock.weights])
    other._step = tf.function(lambda g: other.optimizer.apply([g]))
    for _ in range(3):
        train(20, stock, first)
        train(20, other, second)
    assert_same(first, stock)


def test_table_that_a_step_leaves_out():
    """Its slots rest, in stock Keras, too."""
    stock = Stock(made("adam"))
    kept = Kept(made("adam"))
    for one in (stock, kept):
        one.other = keras.Variable(np.ones(2, "float32"))
        variable = stock.weights if one is stock else kept.table.variable
        one.optimizer = type(one.optimizer).from_config(
            one.optimizer.get_config()
        )
        one.optimizer.build([variable, one.other])
    stock._step = tf.function(
        lambda g: stock.optimizer.apply([g], [stock.weights])
    )

    def each(step):
        if step % 3 == 0:
            for one in (stock, kept):
                one.optimizer.apply([tf.ones([2])], [one.other])

    kept.retrace()
    train(100, stock, kept, each=each)
    assert_same(kept, stock)


def test_skipped_steps_of_loss_scaling_are_none():
    def scaled():
        return keras.optimizers.LossScaleOptimizer(
            made("adam"), initial_scale=4.0, dynamic_growth_steps=20
        )

    stock, kept = Stock(scaled()), Kept(scaled())
    assert kept.keeper is not None
    for step, (ids, values) in enumerate(problem(100)):
        if step % 7 == 3:
            values[0, 0] = np.inf
        for one in (stock, kept):
            one.step(ids, values)
    assert_same(kept, stock)


@pytest.mark.parametrize(
    "options",
    [
        {"use_ema": True, "ema_overwrite_frequency": 2},
        {"beta_1": 0.9999},
        {"beta_2": 0.9},
        {"epsilon": 0.0},
    ],
    ids=str,
)
def test_what_is_not_covered_is_updated_whole(options, caplog):
    options = {"epsilon": 1e-7, **options}
    kept = Kept(keras.optimizers.Adam(**options))
    assert kept.keeper is None
    (record,) = caplog.records
    message = record.getMessage()
    assert f"all {ROWS} rows of the table 'embeddings'" in message
    assert "no closed form" in message


def test_a_regularizer_is_named(caplog):
    table = ks.ShardedTable(ROWS, DIM, regularizer=keras.regularizers.L2())
    ks.HybridOptimizer(made("adam")).build([table.variable])
    assert keeper_of(table.variable.value) is None
    (record,) = caplog.records
    assert "the gradient of its regularizer" in record.getMessage()


def spied(monkeypatch):
    """A list that becomes the numbers of rows that are stored at a time."""
    counts = []
    store = kept_rows.store_rows

    def spy(variable, ids, rows):
        counts.append(int(tf.size(ids)))
        store(variable, ids, rows)

    monkeypatch.setattr(kept_rows, "store_rows", spy)
    return counts


def test_rows_that_never_came_are_not_written(monkeypatch):
    kept = Kept(made("adam"))
    kept.step = kept._step  # not traced
    train(5, kept)
    counts = spied(monkeypatch)
    never = slice(ROWS // 3 + 1, ROWS)
    rows = kept.table.gather(tf.range(ROWS)[never])
    np.testing.assert_array_equal(rows, start()[never])
    np.testing.assert_array_equal(kept.table.read()[never], start()[never])
    assert 0 < max(counts) <= ROWS // 3 + 1


@pytest.mark.parametrize("name", ["adam", "amsgrad", "lion", "momentum"])
@pytest.mark.parametrize("are_slots", [False, True], ids=["weights", "slots"])
def test_rows_that_never_came_rest_again(are_slots, name, monkeypatch):
    """Zeros from outside, as a checkpoint restores them, are found once."""
    stock, kept = Stock(made(name)), Kept(made(name))
    train(5, stock, kept)
    never = slice(ROWS // 3 + 1, ROWS)
    kept.table.assign(kept.table.read())
    if are_slots:
        kept.optimizer.set_weights(kept.optimizer.state())
    train(5, stock, kept)
    counts = spied(monkeypatch)
    kept.table.read()
    assert (max(counts) > ROWS - never.start) == are_slots
    counts.clear()
    train(5, stock, kept)
    np.testing.assert_array_equal(kept.table.read()[never], start()[never])
    assert 0 < max(counts) <= never.start
    assert_same(kept, stock)


def test_checkpoints_of_tensorflow(tmp_path):
    stock, kept = Stock(made("adam")), Kept(made("adam"))
    train(50, stock, kept)
    saved = tf.train.Checkpoint(
        table=kept.table.variable,
        slots=[v for v in kept.variables[2:]],
        iterations=kept.variables[0],
    )
    path = saved.write(str(tmp_path / "state"))
    expected = stock.state()
    train(50, kept)
    saved.read(path).assert_consumed()
    for a, b in zip(kept.state(), expected, strict=True):
        if a.ndim:
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    train(50, stock, kept)
    assert_same(kept, stock)


def test_xla_is_refused():
    kept = Kept(made("adam"))
    for read in (
        lambda: kept.table.gather([1]),
        lambda: kept.table.variable.value + 1.0,
    ):
        with pytest.raises(ValueError, match="jit_compile=False"):
            tf.function(read, jit_compile=True)()


def test_saved_model_of_a_table_in_training(tmp_path):
    kept = Kept(made("adam"))
    module = tf.Module()
    module.table = kept.table.variable.value
    module.read = tf.function(lambda: kept.table.gather([1]))
    module.read()
    with pytest.raises(ValueError, match=r"ks\.export"):
        tf.saved_model.save(module, str(tmp_path / "module"))


class Fit:
    """A model that `fit` trains."""

    def __init__(self, layer, optimizer, regularizer=None, **options):
        layer = layer(ROWS, DIM, embeddings_regularizer=regularizer)
        self.model = keras.Sequential(
            [keras.Input((4,), dtype="int32"), layer]
            + [keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        self.model.layers[0].set_weights([start()])
        self.model.layers[-1].set_weights(
            [np.linspace(-1, 1, 4 * DIM)[:, None], np.zeros(1)]
        )
        self.model.compile(optimizer, loss="mse", **options)

    def fit(self, **more):
        rng = np.random.default_rng(6)
        ids = np.minimum(rng.zipf(1.2, (256, 4)) - 1, ROWS - 1)
        labels = rng.normal(size=(256, 1))
        return self.model.fit(
            ids.astype("int32"),
            labels,
            batch_size=4,
            epochs=2,
            shuffle=False,
            verbose=0,
            **more,
        )


def fitted(regularizer=None, **options):
    """Stock Keras fed the dense gradient, and a model of this package."""
    from tests.oracles import DenseGradients

    options["regularizer"] = regularizer
    stock = Fit(
        keras.layers.Embedding, DenseGradients(made("adam")), regularizer
    )
    with ks.HybridStrategy().scope():
        kept = Fit(ks.layers.ShardedEmbedding, made("adam"), **options)
    return stock, kept


@pytest.mark.parametrize(
    "options",
    [
        {"run_eagerly": True},
        {"steps_per_execution": 8, "regularizer": "l2"},
        {"jit_compile": True},
    ],
    ids=str,
)
def test_ways_to_compile(options):
    stock, kept = fitted(**options)
    stock.fit()
    kept.fit()
    keeper = keeper_of(kept.model.layers[0].table.variable.value)
    # A regularizer touches all rows in each step.
    is_whole = "jit_compile" in options or "regularizer" in options
    assert (keeper is None) == is_whole
    for a, b in zip(
        kept.model.get_weights(), stock.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "method"),
    [
        (ks.layers.ShardedEmbedding, "predict"),
        (keras.layers.Embedding, "predict_on_batch"),
    ],
)
def test_a_prediction_before_the_first_step(layer, method, caplog):
    """Its function knows that rows are behind."""
    with ks.HybridStrategy().scope():
        model = Fit(layer, made("adam")).model
    ids = np.arange(4 * 12).reshape(12, 4)
    getattr(model, method)(ids)
    function = model.predict_function
    for _ in range(2):
        model.train_on_batch(ids[:4], np.ones((4, 1)))
    assert keeper_of(model.trainable_variables[0].value) is not None
    found = getattr(model, method)(ids)
    np.testing.assert_allclose(found, model(ids), rtol=1e-5)
    assert model.predict_function is function
    assert "Each step updates all" not in caplog.text


def test_a_prediction_of_a_model_without_kept_rows_makes_no_slots():
    with ks.HybridStrategy().scope():
        model = Fit(ks.layers.ShardedEmbedding, "adagrad").model
    model.make_predict_function()
    assert not model.optimizer.built


def test_fit_with_all_that_reads_between_steps(tmp_path):
    class Read(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch % 9 == 5:
                self.model.get_weights()
                self.model.predict(np.zeros((2, 4), "int32"), verbose=0)

    stock, kept = fitted()
    ids = np.arange(4 * 12).reshape(12, 4)
    for one in (stock, kept):
        one.fit(
            callbacks=[Read(), keras.callbacks.EarlyStopping("loss", 99)],
            validation_data=(ids, np.ones((12, 1))),
        )
    table = kept.model.layers[0].table
    assert keeper_of(table.variable.value) is not None
    for one in (kept, stock):
        one.predictions = one.model.predict(ids, verbose=0)
    np.testing.assert_allclose(
        kept.predictions, stock.predictions, rtol=1e-4, atol=1e-5
    )
    kept.model.save(tmp_path / "model.keras")
    exported = ks.export(kept.model)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    kept.model.export(str(tmp_path / "served"), verbose=False)
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(
        served.serve(tf.constant(ids, tf.int32)), kept.predictions, rtol=1e-5
    )
    for model in (kept.model, exported, loaded):
        for a, b in zip(
            model.get_weights(), stock.model.get_weights(), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for a, b in zip(
        exported.optimizer.variables, kept.model.optimizer.state(), strict=True
    ):
        np.testing.assert_array_equal(a.numpy(), b)
    for one in (stock, kept):
        one.fit()
    for a, b in zip(
        kept.model.get_weights(), stock.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_ordinary_embedding(tmp_path):
    """Under the strategy, with all that reads between steps."""
    ids = np.arange(4 * 12).reshape(12, 4)
    stock, _ = fitted()
    with ks.HybridStrategy().scope():
        kept = Fit(keras.layers.Embedding, made("adam"))

    class Read(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch % 9 == 5:
                self.model.get_weights()
                self.model(ids)
                self.model.predict(ids, verbose=0)

    for one in (stock, kept):
        one.fit(callbacks=[Read()], validation_data=(ids, np.ones((12, 1))))
    model, variable = kept.model, kept.model.layers[0].embeddings
    assert keeper_of(variable.value) is not None
    assert keeper_of(model.layers[-1].kernel.value) is None
    predictions = model.predict(ids, verbose=0)
    np.testing.assert_allclose(
        predictions, stock.model.predict(ids, verbose=0), rtol=1e-4, atol=1e-5
    )
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    model.export(str(tmp_path / "served"))
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(
        served.serve(tf.constant(ids, tf.int32)), predictions, rtol=1e-5
    )
    for one in (stock, kept):
        one.fit()
    for trained, expected in ((loaded, None), (model, stock.model)):
        weights = trained.get_weights()
        if expected is None:
            np.testing.assert_allclose(
                trained.predict(ids, verbose=0), predictions, rtol=1e-5
            )
            continue
        for a, b in zip(weights, expected.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_step_of_an_ordinary_embedding_reads_rows_alone(monkeypatch):
    """Also from the end, where half a step's numbers are float16."""
    calls = []
    whole_now = kept_rows.KeptRows.whole_now
    settle = kept_rows.KeptRows.settle
    monkeypatch.setattr(
        kept_rows.KeptRows,
        "whole_now",
        lambda *args: calls.append("whole") or whole_now(*args),
    )
    monkeypatch.setattr(
        kept_rows.KeptRows,
        "settle",
        lambda self: calls.append("settle") or settle(self),
    )
    strategy = ks.HybridStrategy()
    with strategy.scope():
        layer = keras.layers.Embedding(ROWS, DIM, dtype="mixed_float16")
        model = keras.Sequential([keras.Input((2,), dtype="int32"), layer])
        model.compile(made("adam"), loss="mse")
    x, y = np.array([[-1, 2], [3, -ROWS]]), np.ones([2, 2, DIM])
    model.fit(x, y, epochs=3, verbose=0)
    assert keeper_of(layer.embeddings.value) is not None
    assert not calls
    rows = model.predict(x, verbose=0)
    assert not calls and rows.dtype == np.float16
    table = layer.embeddings.numpy()
    np.testing.assert_array_equal(rows, table.astype("float16")[x])


# Several processes.


def test_rows_that_never_came_rest_after_a_move(cluster):
    """Owners look at rows that have moved once."""
    results = cluster("native", 2).run(kept_functions.settle_after_a_move)
    first, second = np.sum(results, axis=0)
    ids, _ = kept_functions.data()
    num_touched = len(np.unique(ids))
    assert num_touched < first <= kept_functions.ROWS
    assert 0 < second <= num_touched


def test_whole_updates_are_told_once(cluster):
    """Not after each move, and by rank 0 alone."""
    first, second = cluster("native", 2).run(kept_functions.told_of_updates)
    (record,) = first
    assert "all 50 rows of the table" in record
    assert "0.0024 MB with its slots" in record  # of 3 float32, 4 columns
    assert "no closed form" in record
    assert not second


PREFETCH = {"prefetch": True}
# Engine, processes, rule, whether weights are read between steps, options.
CASES = [
    ("native", 2, "adam", False, PREFETCH),
    ("horovod", 2, "averaged", True, {"architecture": "allreduce"}),
    ("local", 1, "adamax", True, {}),
]
# All rules train on ranks in `closed_form/test_rules.py`, too.
MORE = [
    # Each rank traces the step again after each move, as in a search below.
    ("native", 2, "accumulating", True, PREFETCH),
    ("local", 1, "adadelta", False, {}),
    ("native", 3, "accumulating", True, PREFETCH),
    ("native", 2, "averaged", True, PREFETCH),
    ("native", 2, "adamw", True, {"architecture": "allgather"}),
    ("horovod", 2, "amsgrad", True, {}),
    ("native", 3, "adamw", False, {}),
    ("horovod", 2, "rmsprop", False, {}),
]


@pytest.mark.parametrize(
    ("engine", "num_processes", "name", "reads_between", "options"),
    covering(CASES + MORE, CASES),
)
def test_fit_as_stock_keras(
    cluster, engine, num_processes, name, reads_between, options
):
    results = cluster(engine, num_processes).run(
        kept_functions.train, name, reads_between, options, timeout=200
    )
    assert_trained(results, [name])


COMPILED_AGAIN = [
    ("local", 1, ("adam", "adamw")),
    ("horovod", 2, ("adam", "nesterov")),
]


@pytest.mark.parametrize(
    ("engine", "num_processes", "names"),
    covering(
        [*COMPILED_AGAIN, ("native", 2, ("nesterov", "adam"))], COMPILED_AGAIN
    ),
    ids=str,
)
def test_compiled_again(cluster, engine, num_processes, names):
    """Another optimizer keeps the rows, and functions of before end."""
    results = cluster(engine, num_processes).run(
        kept_functions.train_twice, *names
    )
    assert_trained(results, names, epochs=1)


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_ordinary_embeddings(cluster, engine, tmp_path):
    """Also on ranks that go on from a checkpoint, to the bit.

    And in one process, to the rounding of sums.
    """
    name, architecture = {
        "native": ("adam", "hybrid"),
        "horovod": ("averaged", "allreduce"),
    }[engine]
    options = name, architecture, str(tmp_path)
    run = kept_functions.train_ordinary
    whole = cluster(engine, 2).run(run, *options, "whole", None)
    assert_trained(whole, [name])
    cluster(engine, 2).run(run, *options, "stopped", 38)
    shutil.copytree(tmp_path / "stopped", tmp_path / "other")
    again = cluster(engine, 2).run(run, *options, "stopped", None)
    for a, b in zip(flat(whole[0]), flat(again[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    other = cluster("local", 1).run(run, *options, "other", None)
    assert_close(whole[0], other[0])


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_custom_loop_as_one_process(cluster, engine):
    first, second = cluster(engine, 2).run(kept_functions.own_loop, "nesterov")
    np.testing.assert_array_equal(first, second)
    expected = cluster("local", 1).run(kept_functions.own_loop, "nesterov")[0]
    np.testing.assert_allclose(first, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("engine", "num_processes", "machines"),
    covering([("native", 4, 2), ("horovod", 2, 1)], [("native", 4, 2)]),
)
def test_partitions_are_searched(cluster, engine, num_processes, machines):
    """On several machines, too, and by several steps an execution."""
    results = cluster(engine, num_processes, machines).run(
        kept_functions.search_partitions, "adam", timeout=400
    )
    assert all(5 in tried for *_, tried in results)
    assert_trained(
        [result[:2] for result in results], ["adam"], epochs=1, rate_every=2
    )


def assert_trained(results, names, **how):
    first, *others = map(flat, results)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a, b)
    expected = flat(kept_functions.stock(*names, **how))
    for a, b in zip(first, expected, strict=True):
        np.testing.assert_allclose(
            a, b, rtol=1e-3, atol=2e-5, err_msg=str(names)
        )


def assert_close(first, second):
    """That two runs are the same, to the rounding of sums of gradients."""
    for a, b in zip(flat(first), flat(second), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def flat(weights_and_state):
    weights, state = weights_and_state
    return [*weights, *state]


# "accumulating" goes on below, "averaged" of ordinary embeddings above.
@pytest.mark.all_cells
@pytest.mark.parametrize("name", ["accumulating", "averaged"])
@pytest.mark.parametrize("engine", engines())
def test_goes_on_from_a_checkpoint(cluster, engine, name, tmp_path):
    """To the bit; on another number of ranks, to the rounding of sums."""
    run, folder = kept_functions.save_and_go_on, tmp_path / "stopped"
    whole = cluster(engine, 2).run(run, str(tmp_path / "whole"), None, name)[0]
    cluster(engine, 2).run(run, str(folder), 38, name)
    shutil.copytree(folder, tmp_path / "other")
    again = cluster(engine, 2).run(run, str(folder), None, name)[0]
    for a, b in zip(flat(whole), flat(again), strict=True):
        np.testing.assert_array_equal(a, b)
    other = cluster("local", 1).run(run, str(tmp_path / "other"), None, name)[0]
    assert_close(whole, other)


# "accumulating" goes on below.
@pytest.mark.all_cells
@pytest.mark.parametrize("name", ["nadam", "lion", "ftrl", "amsgrad"])
@pytest.mark.parametrize("engine", engines())
def test_rule_goes_on_in_one_process(cluster, engine, name, tmp_path):
    """From a checkpoint of two."""
    run, folder = kept_functions.save_and_go_on, str(tmp_path / "stopped")
    whole = cluster("local", 1).run(run, str(tmp_path / "whole"), None, name)
    cluster(engine, 2).run(run, folder, 38, name)
    again = cluster("local", 1).run(run, folder, None, name)
    assert_close(whole[0], again[0])


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_goes_on_with_other_numbers_of_processes(cluster, engine, tmp_path):
    """Between two steps of which the gradients are accumulated."""
    run, folder = kept_functions.save_and_go_on, str(tmp_path / "stopped")
    whole = cluster("local", 1).run(run, str(tmp_path / "whole"), None)[0]
    start = cluster("local", 1).run(run, str(tmp_path / "start"), 1)[0]
    cluster("local", 1).run(run, folder, 20)
    cluster(engine, 2).run(run, folder, 32)
    cluster(engine, 4).run(run, folder, 20)
    again = cluster(engine, 2).run(run, folder, None)[0]
    for a, b, c in zip(flat(whole), flat(again), flat(start), strict=True):
        distance = np.abs(a - c).max()
        assert np.abs(a - b).max() <= 1e-5 * distance
