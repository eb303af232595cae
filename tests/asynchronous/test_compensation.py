"""`delay_compensation` applies g + c g g (w - w'), by its definition."""

import functools
import itertools

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from keras_sparsity.asynchronous import servers
from keras_sparsity.asynchronous.store import Store
from keras_sparsity.exchange.options import Options
from tests import asynchronous_functions as functions
from tests import delayed_loop
from tests.conftest import engines

_STRENGTH = 5.0
# A rule, s, the kind of a table, and its number of rows.
_CELLS = [
    ("adagrad", 4, "ShardedEmbedding", functions.WORDS),
    ("momentum", 1, "Embedding", functions.WORDS),
    ("adam", 2, "ShardedEmbedding", functions.LONG),
]


@functools.cache
def _expected(rule, staleness, words, strength):
    model = functions.network(words=words)
    first = model.get_weights()
    passes = [delayed_loop.batches(*functions.data(), functions.BATCH)]
    delayed_loop.train(
        model,
        delayed_loop.RULES[rule](),
        keras.losses.MeanSquaredError(),
        passes * functions.EPOCHS,
        staleness,
        strength,
    )
    return first, model.get_weights()


def _check(found, cell, strength):
    rule, staleness, _, words = cell
    first, expected = _expected(rule, staleness, words, strength)
    _, plain = _expected(rule, staleness, words, 0.0)
    for start, value, of_loop, other in zip(
        first, found, expected, plain, strict=True
    ):
        moved = np.abs(of_loop - start).max()
        # What a missing compensation would miss.
        assert np.abs(of_loop - other).max() > 1e-3 * moved
        np.testing.assert_allclose(
            value, of_loop, rtol=0, atol=1e-4 * moved, err_msg=str(cell)
        )


# `test_delayed.py` trains all of them without.
@pytest.mark.parametrize(
    "cells",
    [_CELLS[:1], pytest.param(_CELLS, marks=pytest.mark.all_cells)],
    ids=["one", "all"],
)
@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_a_fixed_delay_is_compensated(cluster, engine, cells):
    for results in cluster(engine, 2).run(
        functions.train_compensated, cells, _STRENGTH
    ):
        for (weights, *_), cell in zip(results, cells, strict=True):
            _check(weights, cell, _STRENGTH)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_servers_compensate(cluster, engine, tmp_path):
    ranks = cluster(engine, 2).run(
        functions.compensated, str(tmp_path / "go"), 0.1
    )
    kernel, rows = np.array([1, 2, 2]), np.array([[0], [0.5], [1], [0]])
    (*_, of_first), (*_, of_last) = ranks
    assert len(of_first) == 3 and of_last == [0]
    # A pull's version is that of one server; the other one may have applied a
    # push more, or one less, which is under way.
    read = [
        range(max(0, version - 1), n + 1) for n, version in enumerate(of_first)
    ]
    # Rank 1's gradient is of weights before all updates. It comes last, or
    # before rank 0's last push, which is under way.
    orders = [
        order
        for first in itertools.product(*read)
        for order in ([*first, 0], [*first[:2], 0, first[2]])
    ]
    for weights, table, _ in ranks:
        _check_order(weights, kernel, 1, orders)
        # Each row has its own server, which has an order of its own.
        for row, gradient in zip(
            table, np.repeat(rows, 2, axis=1), strict=True
        ):
            _check_order(row, gradient, 0, orders)


def _check_order(weights, gradient, start, orders):
    """Checks that weights are those after updates in one of some orders."""
    expected = min(
        (_compensated(gradient, start, order, 0.1) for order in orders),
        key=lambda found: np.abs(found - weights).max(),
    )
    np.testing.assert_allclose(weights, expected, 1e-5)


def _compensated(gradient, start, versions, strength):
    """Weights after updates by a constant gradient; each was of a version."""
    weights = [np.full(gradient.shape, start, "float64")]
    for version in versions:
        moved = weights[-1] - weights[version]
        change = gradient + strength * gradient**2 * moved
        weights.append(weights[-1] - change)
    return weights[-1]


def test_one_worker_has_nothing_to_compensate():
    found = []
    for strength in (None, 100.0):
        model = functions.network()
        strategy = ks.HybridStrategy(
            synchronous=False, max_staleness=1, delay_compensation=strength
        )
        with strategy.scope():
            model.compile(keras.optimizers.Adagrad(0.1), "mse")
        model.fit(*functions.data(), functions.BATCH, shuffle=False, verbose=0)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_server_updates_by_the_formula():
    rank = ks.HybridStrategy(synchronous=False, max_staleness=1).collectives
    variables = [
        keras.Variable(np.full(shape, 2.0, "float32"))
        for shape in ((3,), (4, 2))
    ]
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(variables)
    found = servers.started(rank)
    store = Store(
        *(found.cluster, 0, optimizer, variables, variables[1:]),
        *(None, False, 3.0, "test_a_server_updates_by_the_formula"),
        Options().wire,
    )
    found.begin(store)
    store.upload()
    push = store.pusher(variables)
    ids, of_rows = np.array([3, 1]), np.array([[1, 2], [3, 4]], "float32")
    push(
        *(np.int64(0), np.int64(0), np.float32(1)),
        *(np.array([1, 2, 3], "float32"), np.array([2, 1, 0], "float32")),
        *(ids, of_rows, np.array([[2, 2], [1, 0]], "float32")),
    )
    store.download()
    found.end(store)
    store.close()
    # 2 - (g + 3 g g (2 - read))
    np.testing.assert_allclose(variables[0].numpy(), [1, -12, -55])
    rows = variables[1].numpy()
    np.testing.assert_allclose(rows[[0, 2]], 2)
    np.testing.assert_allclose(rows[3], [1, 0])
    np.testing.assert_allclose(rows[1], [2 - 3 - 27, 2 - 4 - 96])


def test_of_transformed_gradients_it_is_refused():
    strategy = ks.HybridStrategy(
        synchronous=False,
        max_staleness=1,
        delay="fixed",
        delay_compensation=1.0,
        transform_gradients=lambda gradients, variables: gradients,
    )
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with (
        strategy.scope(),
        pytest.raises(ValueError, match="transform_gradients.*Leave one"),
    ):
        model.compile("sgd", "mse")
