"""Accumulated gradients of tables' rows, against stock Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity._tf.current_variable import keeper_of
from keras_sparsity.update import rules

ROWS, DIM, EVERY = 40, 3, 3


@pytest.fixture(autouse=True)
def kept_however_small(monkeypatch):
    monkeypatch.setattr(rules, "_SMALL_ELEMENTS", 0)


class Trained:
    """A table and a dense variable, of stock Keras or of this package."""

    def __init__(self, make, is_stock, is_traced=True):
        start = np.random.default_rng(3).normal(size=(ROWS, DIM))
        start = start.astype("float32")
        self.dense = keras.Variable(np.ones(2, "float32"))
        # Also of steps that only add up.
        self.dense.constraint = keras.constraints.MinMaxNorm(0.5, 1.0, rate=0.5)
        if is_stock:
            self.table, self.optimizer = keras.Variable(start), make()
        else:
            table = ks.ShardedTable(ROWS, DIM)
            table.assign(start)
            self.table = table.variable
            self.optimizer = ks.HybridOptimizer(make())
        self.variables = [self.table, self.dense]
        self.optimizer.build(self.variables)
        self.step = self._stock_step if is_stock else self._step
        if is_traced:
            self.step = tf.function(self.step)

    def _step(self, ids, values, dense):
        rows = tf.IndexedSlices(values, ids, (ROWS, DIM))
        self.optimizer.apply([rows, dense], self.variables)

    def _stock_step(self, ids, values, dense):
        rows = tf.math.unsorted_segment_sum(values, ids, ROWS)
        self.optimizer.apply([rows, dense], self.variables)

    def state(self):
        """Weights and slots, sums of gradients among them."""
        variables = self.variables + self.optimizer.variables
        return [v.numpy() for v in variables]


def train(stock, kept, num_steps, seed=0, spoil=()):
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        ids = np.minimum(rng.zipf(1.3, 6) - 1, ROWS - 5)
        values, dense = rng.normal(size=(6, DIM)), rng.normal(size=2)
        if step in spoil:
            dense[0] = np.inf
        for one in (stock, kept):
            one.step(
                tf.constant(ids),
                tf.constant(values, tf.float32),
                tf.constant(dense, tf.float32),
            )
    for a, b in zip(kept.state(), stock.state(), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def cosine():
    return keras.optimizers.schedules.CosineDecay(0.05, 100)


MADE = {
    "adam": lambda **more: keras.optimizers.Adam(cosine(), **more),
    "nadam": lambda **more: keras.optimizers.Nadam(0.01, **more),
    "sgd": lambda **more: keras.optimizers.SGD(
        0.1, global_clipnorm=0.3, **more
    ),
    "scaled": lambda **more: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.AdamW(0.01, **more), initial_scale=4.0
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_as_stock_keras(name):
    def make():
        return MADE[name](gradient_accumulation_steps=EVERY)

    stock, kept = Trained(make, True), Trained(make, False)
    assert keeper_of(kept.table.value) is not None
    spoil = (4, 20) if name == "scaled" else ()
    # Compared in the middle of an accumulation, too.
    train(stock, kept, 31, spoil=spoil)
    # Of a variable that steps leave out, Keras drops what it has.
    for one in (stock, kept):
        for _ in range(EVERY):
            one.optimizer.apply([tf.ones([2])], [one.dense])
    train(stock, kept, 31, seed=1)


def test_not_in_a_function():
    def make():
        return MADE["adam"](gradient_accumulation_steps=EVERY)

    train(Trained(make, True), Trained(make, False, is_traced=False), 14)


def test_rows_are_found_behind_what_others_write():
    """A checkpoint that is restored, for example."""

    def make():
        return MADE["adam"](gradient_accumulation_steps=EVERY)

    stock, kept = Trained(make, True), Trained(make, False)
    train(stock, kept, 10)
    values = [v * np.float32(0.5) for v in stock.state()[4:]]
    for one in (stock, kept):
        for variable, value in zip(
            one.optimizer.variables[2:], values, strict=True
        ):
            variable.assign(value)
    train(stock, kept, 10, seed=1)


def test_rows_are_found_behind_one_write_before_the_first_step():
    def make():
        return MADE["adam"](gradient_accumulation_steps=EVERY)

    stock, kept = Trained(make, True), Trained(make, False)
    for one in (stock, kept):
        (sums,) = (
            variable
            for variable in one.optimizer.variables
            if "accumulator" in variable.path and variable.shape[0] == ROWS
        )
        sums.assign(np.ones((ROWS, DIM), "float32"))
    train(stock, kept, EVERY)


def test_accumulated_rows_alone_are_written(monkeypatch):
    """Untouched rows of a table that is not settled stay as they are."""

    def make():
        return MADE["adam"](gradient_accumulation_steps=EVERY)

    stock, kept = Trained(make, True), Trained(make, False)
    train(stock, kept, 30)
    (piece,) = keeper_of(kept.table.value)._pieces
    steps = piece.steps.numpy()
    known = piece.accumulator._rows
    assert known.shape.as_list() == [None]
    for ids in ([1, 2], [2, 5], [6, 6]):
        kept.step(tf.constant(ids), tf.ones([2, DIM]), tf.constant([1.0, 1.0]))
        count = {1: [1, 2], 2: [1, 2, 5], 6: []}[ids[0]]
        np.testing.assert_array_equal(np.sort(known.numpy()), count)
    (changed,) = np.nonzero(piece.steps.numpy() != steps)
    np.testing.assert_array_equal(changed, [1, 2, 5, 6])
