"""Exact updates of each rule, against stock Keras on the dense gradient."""

import keras
import numpy as np
import pytest

from keras_sparsity.update import rules
from tests import rule_runs
from tests.conftest import engines
from tests.rule_runs import (
    FLOAT32_ONLY,
    KEPT,
    RATES,
    RULES,
    SERIES,
    Stock,
    Table,
    assert_accurate,
    error,
    made,
    stock,
    train,
)


@pytest.fixture(autouse=True)
def kept_however_small(monkeypatch):
    monkeypatch.setattr(rules, "_SMALL_ELEMENTS", 0)


@pytest.mark.parametrize("name", KEPT)
def test_as_accurate_as_stock_keras(name):
    kept, lazy = (
        Table(made(name), "float32", way) for way in ("exact", "lazy")
    )
    trained = [kept, lazy]
    if name not in FLOAT32_ONLY:
        precise = Table(made(name), "float64")
        trained.append(precise)
    train(*trained, times=RATES.get(name, 1.0))
    assert_accurate(name, kept.rows())
    exact, _ = stock(name)
    if name not in FLOAT32_ONLY:
        # Narrow numbers that stock Keras has passed are in the step sizes.
        assert error(precise.rows(), exact.rows()) < 1e-12
        for a, b in zip(precise.state(), exact.state(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
    assert error(lazy.rows(), exact.rows()) > 1e-3  # the control


@pytest.mark.parametrize(
    "name",
    ["adamw", "decayed nadam", "decayed lion", "ftrl", "nesterov", "sgd"],
)
def test_weights_that_are_not_negative(name):
    constraint = keras.constraints.NonNeg()
    exact, plain = (
        Stock(made(name), dtype, constraint) for dtype in ("float64", "float32")
    )
    kept, lazy = (
        Table(made(name), "float32", way, constraint)
        for way in ("exact", "lazy")
    )
    train(exact, plain, kept, lazy, times=RATES.get(name, 1.0))
    expected = exact.rows()
    assert np.mean(expected == 0) > 0.05 and expected.max() > 0.01
    own, ours = error(plain.rows(), expected), error(kept.rows(), expected)
    assert ours <= max(1.1 * own, 1e-7), (ours, own)
    np.testing.assert_array_equal(kept.rows(), kept.table.read())
    # Rows that never came are negative, too.
    assert error(lazy.rows(), expected) > 1e-3


@pytest.mark.parametrize("name", SERIES)
def test_one_term_is_not_enough(name):
    with rule_runs.one_term():
        kept = Table(made(name), "float32")
        train(kept)
    exact, _ = stock(name)
    assert error(kept.rows(), exact.rows()) > 1e-5


# Several processes.


def places():
    """Engines, processes and rules: in `make test`, a few at one place.

    All of them are as accurate in one process, above.
    """
    few = "amsgrad", "decayed nadam", "ftrl of all", "nesterov", "rmsprop"
    yield pytest.param("native", 2, few)
    for (param,) in (engines("native"), engines("horovod")):
        for num_processes in (2, 4):
            yield pytest.param(
                *param.values,
                num_processes,
                KEPT,
                marks=[*param.marks, pytest.mark.all_cells],
            )


def ranks_rows(cluster, engine, num_processes, *args):
    """The rows that training on ranks led to, the same on all of them."""
    first, *others = cluster(engine, num_processes).run(
        rule_runs.train_on_ranks, *args, timeout=500
    )
    for other in others:
        for name, rows in first.items():
            np.testing.assert_array_equal(other[name], rows)
    return first


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "num_processes", "names"), list(places()), ids=str
)
def test_ranks_are_as_accurate(cluster, engine, num_processes, names):
    found = ranks_rows(cluster, engine, num_processes, names)
    assert set(found) == set(names) <= set(RULES)
    for name, rows in found.items():
        assert_accurate(name, rows)


@pytest.mark.all_cells
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", engines())
def test_ranks_are_as_accurate_in_float64(cluster, engine):
    names = [name for name in KEPT if name not in FLOAT32_ONLY]
    found = ranks_rows(cluster, engine, 2, names, "float64")
    for name, rows in found.items():
        assert error(rows, stock(name)[0].rows()) < 1e-12, name


# Those of the judge itself, in one process, are above.
@pytest.mark.all_cells
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "names", "controlled"),
    [
        pytest.param("native", SERIES, ("exact", True), id="one term"),
        pytest.param("native", KEPT, ("lazy",), id="lazy"),
    ],
)
def test_ranks_that_are_not(cluster, engine, names, controlled):
    """Controls of the above: the same judge refuses each rule."""
    found = ranks_rows(cluster, engine, 2, names, "float32", *controlled)
    for name, rows in found.items():
        with pytest.raises(AssertionError):
            assert_accurate(name, rows)
