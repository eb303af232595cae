"""Exact updates of each rule, against stock Keras on the dense gradient."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity._tf.current_variable import keeper_of
from keras_sparsity.update import rules
from keras_sparsity.update.closed_form import series

ROWS, DIM, STEPS, IDS = 60, 3, 2400, 8
# Rows of a step that come again after so many steps, and never before.
RARE = 1150
FTRL = {
    "l1_regularization_strength": 0.02,
    "l2_regularization_strength": 0.01,
    "beta": 0.5,
}
RULES = {
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {"weight_decay": 0.1}),
    "amsgrad": ("Adam", {"amsgrad": True}),
    "slow adam": ("Adam", {"beta_1": 0.95, "beta_2": 0.9995}),
    "adam of a long momentum": ("Adam", {"beta_1": 0.99}),
    "adam of a short velocity": ("AdamW", {"beta_2": 0.98}),
    "adam of a shorter velocity": ("Adam", {"beta_2": 0.95}),
    "adam without momentum": ("Adam", {"beta_1": 0.0}),
    "adamax": ("Adamax", {}),
    "nadam": ("Nadam", {}),
    "decayed nadam": ("Nadam", {"weight_decay": 0.1, "beta_2": 0.99}),
    "lion": ("Lion", {}),
    "decayed lion": ("Lion", {"weight_decay": 0.1, "beta_2": 0.95}),
    "ftrl": ("Ftrl", {}),
    "ftrl of all": ("Ftrl", {**FTRL, "weight_decay": 0.1}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.95, "nesterov": True}),
    "sgd": ("SGD", {}),
    "decayed sgd": ("SGD", {"weight_decay": 0.1}),
    "rmsprop": ("RMSprop", {}),
    "rmsprop of all": (
        "RMSprop",
        {"momentum": 0.9, "centered": True, "weight_decay": 0.05},
    ),
    "adadelta": ("Adadelta", {}),
    "decayed adagrad": ("Adagrad", {"weight_decay": 0.1}),
}
# Times the others' learning rates.
RATES = {"adadelta": 1000.0, "ftrl": 20.0, "ftrl of all": 20.0}
# Those that a row needs more of than its last step.
RESTING = ("adam without momentum", "rmsprop", "adadelta")
# In float64, the series would have too many terms.
FLOAT32_ONLY = ("adam of a shorter velocity",)


@pytest.fixture(autouse=True)
def kept_however_small(monkeypatch):
    monkeypatch.setattr(rules, "_SMALL_ELEMENTS", 0)


def start():
    return np.random.default_rng(3).normal(size=(ROWS, DIM))


def problem():
    """Ids by Zipf, the upper ones rarely, a third never; gradients; rates."""
    rng = np.random.default_rng(4)
    ids = np.minimum(rng.zipf(1.2, (STEPS, IDS)) - 1, ROWS // 3)
    ids[RARE // 10 :: RARE, :4] = np.arange(4) + ROWS // 3
    rates = 0.02 * (1 + np.cos(np.pi * np.arange(STEPS) / STEPS)) + 1e-3
    return ids, rng.normal(size=(STEPS, IDS, DIM)), rates


class Stock:
    """Stock Keras, fed the dense gradient."""

    def __init__(self, rule, dtype, constraint=None):
        self.optimizer, self.dtype = rule, dtype
        self.weights = keras.Variable(start().astype(dtype), dtype=dtype)
        self.weights.constraint = constraint
        rule.build([self.weights])

    def step(self, ids, values):
        dense = tf.math.unsorted_segment_sum(values, ids, ROWS)
        self.optimizer.apply([dense])

    def rows(self):
        return self.weights.numpy()

    def state(self):
        return [v.numpy() for v in self.optimizer.variables]


class Table:
    """A table of this package."""

    def __init__(self, rule, dtype, mode="exact", constraint=None):
        self.dtype = dtype
        self.table = ks.ShardedTable(
            ROWS, DIM, dtype=dtype, constraint=constraint
        )
        self.table.assign(start().astype(dtype))
        self.optimizer = ks.HybridOptimizer(rule, mode)
        self.optimizer.build([self.table.variable])
        keeper = keeper_of(self.table.variable.value)
        assert (keeper is None) == (mode == "lazy")

    def step(self, ids, values):
        variables = [self.table.variable]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.table.gather(ids) * values)
        self.optimizer.apply(tape.gradient(loss, variables), variables)

    def rows(self):
        return self.table.gather(tf.range(ROWS)).numpy()

    def state(self):
        return self.optimizer.state()


def train(*trained, times=1.0):
    """Trains all of them in one loop."""
    ids, values, rates = map(tf.constant, problem())

    def body(step):
        for one in trained:
            rate = tf.cast(rates[step] * times, tf.float32)
            one.optimizer.learning_rate.assign(rate)
            one.step(ids[step], tf.cast(values[step], one.dtype))
        return (step + 1,)

    @tf.function(autograph=False)
    def run():
        tf.while_loop(
            lambda step: step < STEPS, body, (0,), parallel_iterations=1
        )

    run()


def error(rows, expected):
    """The distance from what is expected, of the distance moved."""
    return np.linalg.norm(rows - expected) / np.linalg.norm(expected - start())


def made(name):
    kind, options = RULES[name]
    return getattr(keras.optimizers, kind)(**options)


@pytest.mark.parametrize("name", [name for name in RULES if name != "sgd"])
def test_as_accurate_as_stock_keras(name):
    dtypes = "float64", "float32"
    exact, stock = (Stock(made(name), dtype) for dtype in dtypes)
    kept, lazy = (
        Table(made(name), "float32", way) for way in ("exact", "lazy")
    )
    trained = [exact, stock, kept, lazy]
    if name not in FLOAT32_ONLY:
        precise = Table(made(name), "float64")
        trained.append(precise)
    train(*trained, times=RATES.get(name, 1.0))
    expected = exact.rows()
    own, ours = error(stock.rows(), expected), error(kept.rows(), expected)
    assert ours <= max(1.1 * own, 1e-7) and ours < 1e-5, (ours, own)
    if name not in FLOAT32_ONLY:
        # Narrow numbers that stock Keras has passed are in the step sizes.
        assert error(precise.rows(), expected) < 1e-12
        for a, b in zip(precise.state(), exact.state(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    if name not in RESTING:  # the control
        assert error(lazy.rows(), expected) > 1e-3


@pytest.mark.parametrize(
    "name",
    ["adamw", "decayed nadam", "decayed lion", "ftrl", "nesterov", "sgd"],
)
def test_weights_that_are_not_negative(name):
    constraint = keras.constraints.NonNeg()
    exact, stock = (
        Stock(made(name), dtype, constraint) for dtype in ("float64", "float32")
    )
    kept, lazy = (
        Table(made(name), "float32", way, constraint)
        for way in ("exact", "lazy")
    )
    train(exact, stock, kept, lazy, times=RATES.get(name, 1.0))
    expected = exact.rows()
    assert np.mean(expected == 0) > 0.05 and expected.max() > 0.01
    own, ours = error(stock.rows(), expected), error(kept.rows(), expected)
    assert ours <= max(1.1 * own, 1e-7), (ours, own)
    np.testing.assert_array_equal(kept.rows(), kept.table.read())
    # Rows that never came are negative, too.
    assert error(lazy.rows(), expected) > 1e-3


@pytest.mark.parametrize("name", ["adam", "adamax", "nadam"])
def test_one_term_is_not_enough(name, monkeypatch):
    monkeypatch.setattr(
        series, "value", lambda coefficients, x: coefficients[0]
    )
    exact, kept = Stock(made(name), "float64"), Table(made(name), "float32")
    train(exact, kept)
    assert error(kept.rows(), exact.rows()) > 1e-5
