"""`HybridOptimizer` applies every Keras optimizer, to rows too."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.update import rows as row_update
from keras_sparsity.update import rules
from tests.conftest import engines

ROWS, DIM = 9, 3
STEPS = 4

# By name: class and arguments.
BY_ROWS = {
    "sgd": ("SGD", {"learning_rate": 0.5}),
    "momentum": ("SGD", {"learning_rate": 0.1, "momentum": 0.9}),
    "nesterov": (
        "SGD",
        {"learning_rate": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    "rmsprop": ("RMSprop", {}),
    "rmsprop centered": (
        "RMSprop",
        {"learning_rate": 0.01, "momentum": 0.9, "centered": True},
    ),
    "adagrad": ("Adagrad", {"learning_rate": 0.1}),
    "adadelta": ("Adadelta", {"learning_rate": 0.1}),
    "adam": ("Adam", {}),
    "amsgrad": ("Adam", {"learning_rate": 0.01, "amsgrad": True}),
    "adamw": ("AdamW", {"weight_decay": 0.1}),
    "adamax": ("Adamax", {}),
    "nadam": ("Nadam", {}),
    "ftrl": (
        "Ftrl",
        {
            "learning_rate": 0.1,
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.1,
        },
    ),
    "lion": ("Lion", {"learning_rate": 0.01}),
    "schedule free": ("ScheduleFreeAdamW", {"warmup_steps": 2}),
}
# What any of them may be told besides.
WITH = {
    "weight decay": {"weight_decay": 0.1},
    "average": {"use_ema": True, "ema_momentum": 0.7},
    "overwriting average": {"use_ema": True, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipnorm": {"clipnorm": 0.5},
    "clipvalue": {"clipvalue": 0.2},
    "global_clipnorm": {"global_clipnorm": 0.5},
}
NOT_BY_ROWS = ("Lamb", "Adafactor", "Muon")
INSIDE = ("Optimizer", "LossScaleOptimizer")
OF_OTHERS = ("MultiOptimizer",)


@pytest.fixture(autouse=True)
def by_rows_however_small(monkeypatch):
    """All tables here are small ones, which else are updated whole."""
    monkeypatch.setattr(rules, "_SMALL_ELEMENTS", 0)


def made(name, **more):
    kind, arguments = BY_ROWS[name]
    if not hasattr(keras.optimizers, kind):
        pytest.skip(f"this Keras has no {kind}")
    return getattr(keras.optimizers, kind)(**arguments, **more)


def test_every_optimizer_of_keras_is_known():
    classes = {
        name
        for name, value in vars(keras.optimizers).items()
        if inspect.isclass(value)
        and issubclass(value, keras.optimizers.Optimizer)
    }
    known = {kind for kind, _ in BY_ROWS.values()}
    known |= {*NOT_BY_ROWS, *INSIDE, *OF_OTHERS}
    assert classes - known == set()


def gradients(steps=STEPS, count=6):
    """For each step: ids with repeats, of four rows; values; a dense one."""
    rng = np.random.default_rng(4)
    for _ in range(steps):
        rows = rng.choice(ROWS, 4, replace=False)
        ids = np.concatenate([rows, rng.choice(rows, count - 4)])
        values = rng.normal(size=(count, DIM)).astype("float32")
        yield ids, values, rng.normal(size=(2,)).astype("float32")


def summed(ids, values):
    total = np.zeros((ROWS, DIM), "float32")
    np.add.at(total, ids, values)
    return total


def start():
    rng = np.random.default_rng(3)
    return (
        rng.normal(size=(ROWS, DIM)).astype("float32"),
        rng.normal(size=(2,)).astype("float32"),
    )


def slices_of(ids, values):
    shape = tf.constant([ROWS, DIM], tf.int64)
    return tf.IndexedSlices(tf.constant(values), tf.constant(ids), shape)


def stock_on_dense(optimizer):
    """Weights and state by stock Keras, fed dense gradients."""
    variables = [keras.Variable(value) for value in start()]
    optimizer.build(variables)
    for ids, values, dense in gradients():
        optimizer.apply([tf.constant(summed(ids, values)), tf.constant(dense)])
    return [v.numpy() for v in variables + optimizer.variables]


def hybrid(optimizer, sparse_updates="exact"):
    """The same by rows."""
    table = ks.ShardedTable(ROWS, DIM)
    values = start()
    table.assign(values[0])
    variables = [table.variable, keras.Variable(values[1])]
    optimizer = ks.HybridOptimizer(optimizer, sparse_updates)
    optimizer.build(variables)
    for ids, values, dense in gradients():
        optimizer.apply([slices_of(ids, values), tf.constant(dense)])
    return [v.numpy() for v in variables + optimizer.variables]


@pytest.mark.parametrize("name", BY_ROWS)
def test_exact_is_stock_on_the_dense_gradient(name):
    got, expected = hybrid(made(name)), stock_on_dense(made(name))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_small_tables_are_updated_whole(name, monkeypatch):
    by_rows = hybrid(made(name))
    monkeypatch.setattr(rules, "_SMALL_ELEMENTS", ROWS * DIM)
    for a, b in zip(hybrid(made(name)), by_rows, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("more", WITH)
@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
def test_exact_with_all_that_optimizers_take(name, more):
    got = hybrid(made(name, **WITH[more]))
    expected = stock_on_dense(made(name, **WITH[more]))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def stock_on_touched_rows(optimizer):
    """Each step of stock Keras on a small variable of the touched rows."""
    whole, dense_start = start()
    small = keras.Variable(np.zeros((4, DIM), "float32"))
    dense_variable = keras.Variable(dense_start)
    optimizer.build([small, dense_variable])
    is_slot = [v.shape == (4, DIM) for v in optimizer.variables]
    slots = [
        np.repeat(v.numpy()[:1], ROWS, axis=0) if of_rows else None
        for v, of_rows in zip(optimizer.variables, is_slot, strict=True)
    ]
    if type(optimizer).__name__ == "ScheduleFreeAdamW":
        # Its slots named momentum start as the variable itself.
        for slot, v in zip(slots, optimizer.variables, strict=True):
            if slot is not None and v.path.endswith("momentum"):
                slot[...] = whole
    for ids, values, dense in gradients():
        rows = np.unique(ids)
        small.assign(whole[rows])
        for slot, v in zip(slots, optimizer.variables, strict=True):
            if slot is not None:
                v.assign(slot[rows])
        gradient = summed(ids, values)[rows]
        optimizer.apply([tf.constant(gradient), tf.constant(dense)])
        whole[rows] = small.numpy()
        for slot, v in zip(slots, optimizer.variables, strict=True):
            if slot is not None:
                slot[rows] = v.numpy()
    return [whole, dense_variable.numpy()] + [
        v.numpy() if slot is None else slot
        for slot, v in zip(slots, optimizer.variables, strict=True)
    ]


@pytest.mark.parametrize("name", BY_ROWS)
def test_lazy_is_stock_on_the_touched_rows(name):
    got = hybrid(made(name), "lazy")
    expected = stock_on_touched_rows(made(name))
    for a, b in zip(got, expected, strict=True):
        # Powers and roots of vectors round by how they are aligned.
        np.testing.assert_allclose(a, b, rtol=5e-7)


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_lazy_and_exact_are_the_same_where_zeros_change_nothing(name):
    for a, b in zip(
        hybrid(made(name), "lazy"), hybrid(made(name)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("more", ["average", "accumulation"])
def test_lazy_updates_the_whole_where_each_row_must_be_seen(more):
    got = hybrid(made("adam", **WITH[more]), "lazy")
    for a, b in zip(
        got, stock_on_dense(made("adam", **WITH[more])), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_updates_only_the_touched_rows(monkeypatch):
    """The cheap way is taken, in both modes, where it is known."""
    seen = []
    original = row_update.stand_in_for

    def spy(optimizer, row_updates):
        seen.append(len(row_updates))
        return original(optimizer, row_updates)

    monkeypatch.setattr(row_update, "stand_in_for", spy)
    cheap = ("adagrad", "exact"), ("adam", "lazy"), ("adam", "exact")
    for name, mode in cheap:
        hybrid(made(name), mode)
    assert seen == [1] * len(cheap) * STEPS
    seen.clear()
    hybrid(made("adam", beta_2=0.5), "exact")
    assert seen == [0] * STEPS


@pytest.mark.parametrize("mode", ["exact", "lazy"])
@pytest.mark.parametrize("axis", [0, 1])
def test_constraints(mode, axis):
    constraint = keras.constraints.MaxNorm(0.5, axis=axis)
    table = ks.ShardedTable(ROWS, DIM, constraint=constraint)
    whole = start()[0]
    table.assign(whole)
    ids, values, _ = next(gradients())
    optimizer = ks.HybridOptimizer(made("sgd"), mode)
    optimizer.apply([slices_of(ids, values)], [table.variable])
    moved = whole - 0.5 * summed(ids, values)
    expected = keras.ops.convert_to_numpy(constraint(moved))
    if mode == "lazy" and axis == 1:
        untouched = np.setdiff1d(np.arange(ROWS), ids)
        expected[untouched] = whole[untouched]
    np.testing.assert_allclose(table.read(), expected, rtol=1e-6)


@pytest.mark.parametrize("name", NOT_BY_ROWS)
def test_refuses_what_is_not_by_rows(name):
    if not hasattr(keras.optimizers, name):
        pytest.skip(f"this Keras has no {name}")
    optimizer = ks.HybridOptimizer(getattr(keras.optimizers, name)())
    table = ks.ShardedTable(ROWS, DIM)
    with pytest.raises(ValueError, match=f"{name}.*(?s:.*)Adagrad"):
        optimizer.build([table.variable])


def test_refuses_optimizers_of_others():
    class Twice(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            for _ in range(2):
                super().apply(grads, trainable_variables)

    class Centered(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars):
            return super().apply_gradients(
                [(g - tf.reduce_mean(g), v) for g, v in grads_and_vars]
            )

    for optimizer, message in (
        (Twice(0.1), "Twice has an `apply`"),
        (
            keras.optimizers.LossScaleOptimizer(Twice(0.1)),
            "Twice has an `apply`",
        ),
        (Centered(0.1), "an `apply_gradients`.*`transform_gradients`"),
    ):
        with pytest.raises(ValueError, match=message):
            ks.HybridOptimizer(optimizer)


def test_state_of_a_rule_without_slots_is_loaded():
    """It has as many variables before its first step.

    Of another rule's there is a warning, as Keras has.
    """
    saved, loaded = (ks.HybridOptimizer("sgd") for _ in range(2))
    variable = keras.Variable([1.0, 2.0])
    for optimizer in (saved, loaded):
        optimizer.build([variable])
    for _ in range(3):
        saved.apply([tf.ones([2])], [variable])
    store = {}
    saved.save_own_variables(store)
    loaded.load_own_variables(store)
    assert int(loaded.iterations) == 3
    other = ks.HybridOptimizer("adam")
    other.build([variable])
    other.save_own_variables(store)
    with pytest.warns(UserWarning, match="has 2 variables.*has 4 variables"):
        loaded.load_own_variables(store)
    assert int(loaded.iterations) == 3


def test_an_infinite_gradient_is_told_by_all_weights():
    """As by Keras: the norm of all is none."""
    found = []
    for wrap in (lambda rule: rule, ks.HybridOptimizer):
        variables = [keras.Variable([1.0, 2.0]), keras.Variable([3.0])]
        optimizer = wrap(keras.optimizers.SGD(0.1, global_clipnorm=1.0))
        gradients = [tf.constant([np.inf, 1.0]), tf.ones([1])]
        optimizer.apply(gradients, variables)
        found.append([v.numpy() for v in variables])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["Lamb", "Adafactor"])
def test_dense_variables_take_any_optimizer(name):
    kind = getattr(keras.optimizers, name)
    value = start()[0]
    stock, wrapped = keras.Variable(value), keras.Variable(value)
    plain, optimizer = kind(0.1), ks.HybridOptimizer(kind(0.1))
    for ids, values, _ in gradients():
        plain.apply([tf.constant(summed(ids, values))], [stock])
        # As an ordinary embedding's gradient.
        optimizer.apply([slices_of(ids, values)], [wrapped])
    np.testing.assert_allclose(wrapped.numpy(), stock.numpy(), rtol=1e-6)


# As an optimizer among Keras's own.


def test_forwards_attributes():
    inner = keras.optimizers.Adam(0.25, beta_1=0.8)
    optimizer = ks.HybridOptimizer(inner)
    assert float(optimizer.learning_rate) == 0.25
    assert optimizer.beta_1 == 0.8
    optimizer.learning_rate = 0.5
    optimizer.beta_1 = 0.7
    optimizer.clipvalue = 2.0
    optimizer.loss_scale_factor = 8.0
    assert (inner.beta_1, inner.clipvalue) == (0.7, 2.0)
    assert float(inner.learning_rate) == 0.5
    assert float(optimizer.scale_loss(1.0)) == 8.0
    assert optimizer.iterations is inner.iterations
    assert optimizer.inner_optimizer is inner
    with pytest.raises(AttributeError, match="beta_3"):
        optimizer.beta_3  # noqa: B018


@pytest.mark.parametrize("name", BY_ROWS)
def test_config_round_trip(name):
    optimizer = ks.HybridOptimizer(made(name), sparse_updates="lazy")
    config = keras.optimizers.serialize(optimizer)
    copy = keras.optimizers.deserialize(config)
    assert type(copy) is ks.HybridOptimizer
    assert copy.get_config() == optimizer.get_config()
    assert copy.sparse_updates == "lazy"


def test_weights_can_be_set_and_unknown_variables_are_refused():
    first, second = (ks.HybridOptimizer(keras.optimizers.Adam()) for _ in "ab")
    table = ks.ShardedTable(ROWS, DIM)
    for optimizer in (first, second):
        optimizer.build([table.variable])
    ids, values, _ = next(gradients())
    first.apply([slices_of(ids, values)])
    second.set_weights(first.state())
    for a, b in zip(first.variables, second.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    with pytest.raises(ValueError, match="Unknown variable"):
        first.apply([tf.zeros([2])], [keras.Variable([0.0, 0.0])])


def test_schedule():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    got = hybrid(keras.optimizers.Adagrad(schedule))
    expected = stock_on_dense(keras.optimizers.Adagrad(schedule))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# Several processes, with tables and nothing else. The rest is in
# `test_equality.py`.

SPREAD = {
    "adam, global_clipnorm": ("adam", WITH["global_clipnorm"]),
    "accumulation, clipnorm": (
        "adam",
        {"gradient_accumulation_steps": 2, "clipnorm": 0.5},
    ),
}


def spread_problem(step, rank, size):
    """One rank's ids and the gradients of their rows."""
    rng = np.random.default_rng([8, step])
    ids = rng.integers(0, ROWS, (4 * size,))
    values = rng.normal(size=(4 * size, DIM)).astype("float32")
    part = slice(4 * rank, 4 * (rank + 1))
    return ids[part], values[part]


def train_spread():
    """On every rank: all weights and the whole state, for each case."""
    strategy = ks.HybridStrategy()
    results = {}
    for case, (name, more) in SPREAD.items():
        whole, _ = start()
        tables = [
            ks.ShardedTable(ROWS, DIM, count, owner_name=f"{case} {count}")
            for count in (1, 3)
        ]
        for table in tables:
            table.assign(whole)
        variables = [table.variable for table in tables]
        optimizer = ks.HybridOptimizer(made(name, **more))
        optimizer.build(variables)

        def step(ids, values, tables, variables, optimizer):
            with tf.GradientTape() as tape:
                loss = 0.0
                for table in tables:
                    loss += tf.reduce_sum(table.gather(ids) * values)
            optimizer.apply(tape.gradient(loss, variables), variables)

        for number in range(STEPS):
            part = spread_problem(number, strategy.rank, strategy.size)
            strategy.run(step, (*part, tables, variables, optimizer))
        results[case] = [v.numpy() for v in variables] + optimizer.state()
    return results


def stock_spread(case, size):
    name, more = SPREAD[case]
    variables = [keras.Variable(start()[0]) for _ in range(2)]
    optimizer = made(name, **more)
    optimizer.build(variables)
    for number in range(STEPS):
        parts = [spread_problem(number, rank, size) for rank in range(size)]
        ids, values = (
            np.concatenate(arrays) for arrays in zip(*parts, strict=True)
        )
        gradient = tf.constant(summed(ids, values))
        optimizer.apply([gradient, gradient])
    return [v.numpy() for v in variables + optimizer.variables]


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_tables_alone_as_on_one_process(cluster, engine):
    expected = {case: stock_spread(case, 2) for case in SPREAD}
    for results in cluster(engine, 2).run(train_spread):
        for case in SPREAD:
            for a, b in zip(results[case], expected[case], strict=True):
                np.testing.assert_allclose(
                    a, b, rtol=1e-4, atol=1e-5, err_msg=case
                )


def rank_without_rows():
    """A model of one table, of which one rank owns nothing."""
    strategy = ks.HybridStrategy()
    tables = []
    for more in ({"clipnorm": 0.5}, {"global_clipnorm": 0.5}, {}):
        for steps in (None, 2):
            table = ks.ShardedTable(ROWS, DIM, 1, owner_name=f"{more}{steps}")
            table.assign(start()[0])
            optimizer = ks.HybridOptimizer(
                keras.optimizers.Adam(
                    0.1, gradient_accumulation_steps=steps, **more
                )
            )

            def step(ids, values, table, optimizer):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(table.gather(ids) * values)
                variables = [table.variable]
                optimizer.apply(tape.gradient(loss, variables), variables)

            for number in range(STEPS):
                ids, values = spread_problem(number, strategy.rank, 2)
                strategy.run(step, (ids, values, table, optimizer))
            tables.append((table.read(), int(optimizer.iterations)))
    return tables


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_rank_without_rows_goes_along(cluster, engine):
    first, second = cluster(engine, 2).run(rank_without_rows)
    for (table, steps), (other, other_steps) in zip(first, second, strict=True):
        np.testing.assert_array_equal(table, other)
        assert steps == other_steps
        assert not np.array_equal(table, start()[0])
    assert [steps for _, steps in first] == [4, 2] * 3
