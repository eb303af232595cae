"""Averages of kept rows (`use_ema`), against stock Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity._tf.current_variable import keeper_of
from keras_sparsity.update import rules, step_sums
from tests import rule_runs
from tests.oracles import DenseGradients
from tests.update import test_kept_rows as loops

# A momentum of the averages by each rule, one or more of each closed form.
MOMENTA = {
    "adamw": 0.99,
    "amsgrad": 0.9,
    "adamax": 0.99,
    "decayed nadam": 0.99,
    "decayed lion": 0.98,
    "ftrl": 0.99,
    "nesterov": 0.5,
    "rmsprop of all": 0.99,
    "adadelta": 0.0,
    "sgd": 0.99,
}
# In the state of a stock optimizer: behind the steps and the learning rate.
AVERAGE = 2


@pytest.fixture(autouse=True)
def kept_however_small(monkeypatch):
    monkeypatch.setattr(rules, "_SMALL_ELEMENTS", 0)


def made(name, momentum=None):
    kind, options = rule_runs.RULES[name]
    momentum = MOMENTA[name] if momentum is None else momentum
    averages = {"use_ema": True, "ema_momentum": momentum}
    return getattr(keras.optimizers, kind)(**options, **averages)


@pytest.mark.parametrize("name", MOMENTA)
def test_as_accurate_as_stock_keras(name):
    exact, stock = (
        rule_runs.Stock(made(name), dtype) for dtype in ("float64", "float32")
    )
    kept, precise = (
        rule_runs.Table(made(name), dtype) for dtype in ("float32", "float64")
    )
    trained = exact, stock, kept, precise
    rule_runs.train(*trained, times=rule_runs.RATES.get(name, 1.0))
    keeper = keeper_of(kept.table.pieces[0].value)
    # No step has gone over the whole table.
    assert keeper.sums.now == rule_runs.STEPS
    for read in (lambda one: one.rows(), lambda one: one.state()[AVERAGE]):
        expected = read(exact)
        own, ours = (
            rule_runs.error(read(one), expected) for one in (stock, kept)
        )
        assert ours <= rule_runs.limit(name, own) and ours < 1e-5, (ours, own)
    for a, b in zip(precise.state(), exact.state(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    # The control: averages do not end where the weights do.
    if MOMENTA[name]:
        assert rule_runs.error(expected, kept.rows()) > 5e-5


@pytest.mark.parametrize("name", ["adamw", "decayed lion", "ftrl"])
def test_clock_that_is_full_begins_anew(name, monkeypatch):
    monkeypatch.setattr(step_sums, "_FEWEST_STEPS", 1)
    monkeypatch.setattr(step_sums, "_MOST_STEPS", 1)
    stock, kept = loops.Stock(made(name)), loops.Kept(made(name))
    capacity = kept.keeper.sums.capacity
    loops.train(max(2 * capacity, 100), stock, kept)
    loops.assert_same(kept, stock)


@pytest.mark.parametrize("kind", ["SGD", "Lion"])
def test_weights_that_decay_faster_than_their_averages(kind):
    """Late steps add little to means of large weights, which rounding hides."""
    options = {"weight_decay": 3.0, "use_ema": True, "ema_momentum": 0.999}
    stock, kept = (
        of(getattr(keras.optimizers, kind)(0.1, **options), "float64")
        for of in (loops.Stock, loops.Kept)
    )
    for ids, values in loops.problem(300, "float64", rare=70):
        for one in (stock, kept):
            one.step(ids, values)
    loops.assert_same(kept, stock, rtol=1e-6, atol=1e-10)


def test_first_step_that_comes_again():
    """Which has no momentum, also of rows that are behind."""
    stock, kept = loops.Stock(made("adamw")), loops.Kept(made("adamw"))

    def each(step):
        if step in (60, 100):
            for one in (stock, kept):
                one.optimizer.iterations.assign(0)

    loops.train(150, stock, kept, each=each)
    assert kept.keeper.sums.now == 150
    loops.assert_same(kept, stock)


def test_final_weights_are_the_averages():
    stock, kept = loops.Stock(made("adamw")), loops.Kept(made("adamw"))
    for _ in range(2):
        loops.train(60, stock, kept)
        before = stock.weights.numpy()
        stock.optimizer.finalize_variable_values([stock.weights])
        kept.optimizer.finalize_variable_values([kept.table.variable])
        assert np.abs(stock.weights.numpy() - before).max() > 0.01
        loops.assert_same(kept, stock)


def test_average_of_a_table_that_a_step_leaves_out():
    """It goes on, for Keras averages all variables in each step."""
    stock, kept = loops.Stock(made("adam", 0.9)), loops.Kept(made("adam", 0.9))
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
        if step % 5 == 0:
            for one in (stock, kept):
                one.optimizer.apply([tf.ones([2])], [one.other])

    kept.retrace()
    loops.train(60, stock, kept, each=each)
    loops.assert_same(kept, stock)


@pytest.mark.parametrize(
    "options",
    [
        {"ema_overwrite_frequency": 3},
        {"gradient_accumulation_steps": 3},
        {"ema_momentum": 1.0},
    ],
    ids=str,
)
def test_averages_that_are_updated_whole(options, caplog):
    stock, kept = (
        of(keras.optimizers.Adam(use_ema=True, **options))
        for of in (loops.Stock, loops.Kept)
    )
    (record,) = caplog.records
    assert "no closed form" in record.getMessage()
    loops.train(20, stock, kept)
    assert keeper_of(kept.table.variable.value) is None
    loops.assert_same(kept, stock)


@pytest.mark.parametrize(
    ("kind", "options", "constraint"),
    [
        ("Adam", {}, "non_neg"),
        # The mean of its weights depends on more than that of its rates.
        ("Ftrl", {"l2_regularization_strength": 0.01}, None),
    ],
)
def test_averages_without_a_closed_form(kind, options, constraint, caplog):
    table = ks.ShardedTable(
        rule_runs.ROWS,
        rule_runs.DIM,
        constraint=keras.constraints.get(constraint),
    )
    rule = getattr(keras.optimizers, kind)(use_ema=True, **options)
    ks.HybridOptimizer(rule).build([table.variable])
    assert keeper_of(table.variable.value) is None
    (record,) = caplog.records
    assert "no closed form" in record.getMessage()


def test_fit_saves_and_loads_averages(tmp_path):
    def adam():
        return keras.optimizers.Adam(use_ema=True, ema_momentum=0.9)

    stock = loops.Fit(keras.layers.Embedding, DenseGradients(adam()))
    with ks.HybridStrategy().scope():
        kept = loops.Fit(ks.layers.ShardedEmbedding, adam())
    for _ in range(2):
        for one in (stock, kept):
            one.fit()
        table = kept.model.layers[0].table
        assert keeper_of(table.variable.value) is not None
        kept.model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        state = [v.numpy() for v in stock.model.optimizer.inner.variables]
        expected = [*stock.model.get_weights(), *state]
        for model in (kept.model, loaded):
            found = [*model.get_weights(), *model.optimizer.state()]
            for a, b in zip(found, expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
