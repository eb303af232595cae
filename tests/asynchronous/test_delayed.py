"""`delay="fixed"` trains as a loop with old weights in stock Keras does."""

import functools
from unittest import mock

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from keras_sparsity import launch
from keras_sparsity.training import runs
from tests import asynchronous_functions as functions
from tests import delayed_loop, forked
from tests.conftest import engines

# A rule, s, the kind of a table, and its number of rows.
_CELLS = [
    ("adagrad", 4, "ShardedEmbedding", functions.WORDS),
    ("momentum", 1, "Embedding", functions.WORDS),
    ("adam", 2, "ShardedEmbedding", functions.LONG),
]
_ALL = [
    (rule, staleness, kind, words)
    for rule in delayed_loop.RULES
    for staleness in (0, 1, 2, 4)
    for kind in ("Embedding", "ShardedEmbedding")
    for words in (functions.WORDS, functions.LONG)
]


@functools.cache
def _expected(rule, staleness, words):
    model = functions.network(words=words)
    first = model.get_weights()
    optimizer = delayed_loop.RULES[rule]()
    passes = [delayed_loop.batches(*functions.data(), functions.BATCH)]
    losses = delayed_loop.train(
        model,
        optimizer,
        keras.losses.MeanSquaredError(),
        passes * functions.EPOCHS,
        staleness,
    )
    state = [v.numpy() for v in optimizer.variables]
    return first, model.get_weights(), state, losses


def _check(result, cell):
    rule, staleness, _, words = cell
    first, weights, state, losses = _expected(rule, staleness, words)
    found_weights, found_state, history = result
    for start, value, expected in zip(
        first, found_weights, weights, strict=True
    ):
        moved = np.abs(expected - start).max()
        np.testing.assert_allclose(
            value, expected, rtol=0, atol=1e-4 * moved, err_msg=str(cell)
        )
    for value, expected in zip(found_state, state, strict=True):
        largest = np.abs(expected).max()
        np.testing.assert_allclose(
            value, expected, rtol=0, atol=1e-4 * largest, err_msg=str(cell)
        )
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)


def _check_same(first, second):
    """Two runs have the same weights, optimizer's state and history."""
    for values, others in zip(first[:2], second[:2], strict=True):
        for one, other in zip(values, others, strict=True):
            np.testing.assert_array_equal(one, other)
    assert first[2] == second[2]


def test_the_oracle_tells_delays_apart():
    _, *fresh = _expected("sgd", 0, functions.WORDS)
    _, *old = _expected("sgd", 1, functions.WORDS)
    assert np.abs(fresh[0][0] - old[0][0]).max() > 1e-3


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_weights_are_exactly_so_old(cluster, engine):
    cells = [*_CELLS, _CELLS[0]]
    for results in cluster(engine, 2).run(functions.train_several, cells):
        for result, cell in zip(results, cells, strict=True):
            _check(result, cell)
        # A second run, to the bit.
        _check_same(results[0], results[-1])


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_dedicated_servers_wait_as_well(cluster, engine):
    ranks = cluster(engine, 2, num_servers=2)
    for (result,) in ranks.run(functions.train_several, [_CELLS[0]]):
        _check(result, _CELLS[0])


@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize("num_servers", [0, 1])
@pytest.mark.parametrize("cell", _ALL)
def test_all_rules_and_delays(
    cluster, engine, num_processes, num_servers, cell
):
    run = cluster(engine, num_processes, num_servers=num_servers).run
    for first, second in run(functions.train_several, [cell, cell]):
        _check(first, cell)
        _check_same(first, second)


@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("num_servers", [0, 1])
def test_two_launches_are_equal_to_the_bit(engine, num_servers):
    launched = []
    for _ in range(2):
        with forked.ranks():
            launched.append(
                launch.run(
                    *(functions.train_several, 2, engine, (_CELLS[2:],)),
                    num_servers=num_servers,
                    timeout=240,
                )
            )
    for first, second in zip(*launched, strict=True):
        for one, other in zip(first, second, strict=True):
            _check_same(one, other)


def _compiled(optimizer="sgd", **options):
    strategy = ks.HybridStrategy(
        synchronous=False, max_staleness=1, delay="fixed", **options
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse")
    return model


def test_one_process_waits_as_well():
    model = _compiled(keras.optimizers.SGD(0.5))
    start = model.get_weights()
    x = np.ones((3, 2), "float32")
    model.fit(x, x[:, :1], 1, shuffle=False, verbose=0)
    expected = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    expected.set_weights(start)
    batches = delayed_loop.batches(x, x[:, :1], 1)
    delayed_loop.train(
        expected,
        keras.optimizers.SGD(0.5),
        keras.losses.MeanSquaredError(),
        [batches],
        1,
    )
    for one, other in zip(
        model.get_weights(), expected.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, 1e-6)


def test_eager_steps_are_those_of_a_graph():
    x = np.arange(6, dtype="float32").reshape(3, 2) / 5
    found = []
    for is_eager in (False, True):
        keras.utils.set_random_seed(0)
        model = _compiled(keras.optimizers.SGD(0.5))
        model.run_eagerly = is_eager
        model.fit(x, x[:, :1], 1, shuffle=False, verbose=0, epochs=2)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-6)


def test_what_would_lose_gradients_is_refused():
    scaling = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="LossScaleOptimizer.*bfloat16"):
        _compiled(scaling)
    model = _compiled()
    x = np.ones((2, 2), "float32")
    with pytest.raises(ValueError, match="train_on_batch.*max_staleness=1"):
        model.train_on_batch(x, x[:, :1])
    for name in ("every_steps", "every_seconds"):
        checkpoint = ks.callbacks.ShardedCheckpoint("unused", **{name: 1})
        with pytest.raises(ValueError, match=f"{name}=1"):
            model.fit(x, x[:, :1], callbacks=[checkpoint], verbose=0)
    search = ks.callbacks.PartitionSearch()
    with pytest.raises(ValueError, match="a PartitionSearch.*synchronous"):
        model.fit(x, x[:, :1], callbacks=[search], verbose=0)


class TwoOptimizers(keras.Sequential):
    """As adversarial models, with an optimizer of its own for each part."""

    def compile(self, first, second, **options):
        super().compile(**options)
        self.optimizers = {"first": first, "second": second}


def test_another_optimizer_is_refused():
    """Nothing would delay it."""
    strategy = ks.HybridStrategy(
        synchronous=False, max_staleness=1, delay="fixed"
    )
    model = TwoOptimizers([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer, x = keras.optimizers.SGD(), np.ones((2, 2), "float32")
    with strategy.scope():
        model.compile(optimizer, optimizer, optimizer=optimizer, loss="mse")
    model.fit(x, x[:, :1], verbose=0)  # the same in three places
    with strategy.scope():
        model.compile(optimizer, keras.optimizers.Adam(), loss="mse")
    with pytest.raises(ValueError, match=r"optimizers\['first'\]`, a SGD"):
        model.fit(x, x[:, :1], verbose=0)


class _Moves(keras.callbacks.Callback):
    """Moves tables while gradients wait, and notes the errors."""

    def __init__(self):
        super().__init__()
        self.errors = []

    def on_train_batch_end(self, batch, logs=None):
        try:
            table = self.model.layers[0].table
            ks.moves.repartition(self.model, {table: 1})
        except ValueError as error:
            self.errors.append(str(error))


def _moves_in_an_epoch():
    """Errors, weights after a `fit` with them, and after one without."""
    moves, found = _Moves(), []
    strategy = ks.HybridStrategy(
        synchronous=False, max_staleness=1, delay="fixed"
    )
    for callbacks in ([moves], []):
        keras.utils.set_random_seed(0)
        layer = ks.layers.ShardedEmbedding(9, 2, architecture="auto")
        model = keras.Sequential([keras.Input((2,), dtype="int32"), layer])
        with (
            strategy.scope(),
            # It would move the table, too.
            mock.patch.object(runs.auto_architecture, "AutoArchitecture", None),
        ):
            model.compile(keras.optimizers.SGD(0.5), "mse")
            x = np.arange(8).reshape(4, 2)
            model.fit(x, np.ones((4, 2, 2)), 1, callbacks=callbacks, verbose=0)
        found += model.get_weights()
    return moves.errors, *found


def test_tables_stay_where_they_are_while_gradients_wait(cluster):
    for errors, *weights in cluster("native", 2).run(_moves_in_an_epoch):
        assert len(errors) == 4
        assert "between calls of `fit`" in errors[0]
        np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize("is_traced", [False, True])
def test_evaluation_within_an_epoch_applies_nothing(is_traced):
    x = np.arange(6, dtype="float32").reshape(3, 2) / 5
    found = []
    for evaluates in (False, True):
        keras.utils.set_random_seed(0)
        model = _compiled(keras.optimizers.SGD(0.5))
        if is_traced:
            model.evaluate(x, x[:, :1], verbose=0)

        def evaluate(batch, logs, model=model, evaluates=evaluates):
            if evaluates:
                model.evaluate(x, x[:, :1], verbose=0)
                model.get_metrics_result()

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=evaluate)
        options = {"shuffle": False, "verbose": 0, "epochs": 2}
        model.fit(x, x[:, :1], 1, callbacks=[callback], **options)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
