"""Workers that pull and push by themselves, at servers."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator

import keras_sparsity as ks
from keras_sparsity.board import reports
from tests import asynchronous_functions as functions
from tests import delayed_loop
from tests.conftest import covering, engines


def _served(model, optimizer, loss="mse", **options):
    strategy = ks.HybridStrategy(synchronous=False, **options)
    with strategy.scope():
        model.compile(optimizer, loss)
    return strategy


@pytest.mark.parametrize("rule", list(functions.RULES))
def test_one_worker_trains_as_stock_keras(rule):
    found, staleness = functions.train_dense(rule, True)
    _check_equal(found, functions.train_dense(rule, False)[0])
    # Of an epoch's 5 batches.
    assert staleness == {0: 5}


@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("rule", list(functions.RULES))
def test_one_worker_of_servers_trains_as_stock_keras(
    cluster, engine, num_servers, rule
):
    ranks = cluster(engine, 1, num_servers=num_servers).run(
        functions.train_dense, rule, True
    )
    expected, _ = functions.train_dense(rule, False)
    for found, staleness in ranks:
        _check_equal(found, expected)
        assert staleness == {0: 5}


def _check_equal(found, expected):
    for values, others in zip(found, expected, strict=True):
        for one, other in zip(values, others, strict=True):
            np.testing.assert_allclose(one, other, 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("engine", "num_servers"),
    covering(
        [(engine, n) for engine in ("native", "horovod") for n in (0, 2)],
        [("native", 2)],
    ),
)
def test_no_pull_is_older_than_the_bound(
    cluster, engine, num_servers, tmp_path
):
    bound, count = 2, 150
    ranks = cluster(engine, 3, num_servers=num_servers).run(
        functions.watched_pulls, bound, count, str(tmp_path / "ahead")
    )
    _check_bound(ranks, 3, bound, count)


@pytest.mark.all_cells
@pytest.mark.parametrize("num_servers", [0, 2])
@pytest.mark.parametrize("bound", [1, 2, 4])
def test_no_pull_of_ten_thousand_is_older(
    cluster, bound, num_servers, tmp_path
):
    call = functions.watched_pulls, bound, 10_000, str(tmp_path / "ahead")
    ranks = cluster("native", 3, num_servers=num_servers).run(
        *call, timeout=600
    )
    _check_bound(ranks, 3, bound, 10_000)


def _check_bound(ranks, num_workers, bound, count):
    """No pull has seen too few steps of any worker.

    Not at any server, and neither of a dense variable nor of rows.
    """
    numbers = [len(seen) for seen, *_ in ranks[:num_workers]]
    # Each batch was one step of one worker, and each step was applied.
    assert sum(numbers) == count
    largest = 0
    # Of a pull and its push: each other worker is ahead or behind by the bound
    # at most, and one push of each, also of this one, may be under way.
    most = (2 * bound + 1) * (num_workers - 1) + 1
    for rank, (seen, weights, staleness) in enumerate(ranks):
        assert (weights == numbers).all(), weights
        assert sum(staleness.values()) == count
        assert max(staleness) <= most, staleness
        for step, pulled in enumerate(seen):
            # Its own last push may be under way.
            assert (step - 1 <= pulled[:, rank]).all()
            assert (pulled[:, rank] <= step).all()
            # A worker that has ended its part has no more steps to show.
            oldest = np.minimum(step - bound, numbers)
            assert (pulled >= oldest).all(), (rank, step, pulled)
            largest = max(largest, step - pulled.min())
    assert largest >= bound  # Rank 0 has waited.


def test_without_a_bound_nobody_waits(cluster, tmp_path):
    # Rank 1 begins its first step when rank 0 has ended its twentieth.
    ranks = cluster("native", 2).run(
        functions.one_waits, None, str(tmp_path / "go")
    )
    (first, *_), (second, *_) = ranks
    assert first >= 20 and second >= 1 and first + second == 40


def test_an_old_gradients_rate_is_smaller(cluster, tmp_path):
    # One server: two may get pushes of several workers in different orders.
    *workers, _ = cluster("native", 2, num_servers=1).run(
        functions.one_waits_and_is_aware, str(tmp_path / "go")
    )
    for _, weights, staleness in workers:
        assert max(staleness) >= 19  # of 20, of which one is under way
        expected = sum(n / max(1, old) for old, n in staleness.items())
        assert weights.sum(1) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("limit", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_gradients_of_rows_are_clipped(limit):
    x, y = functions.data()
    model = functions.network()
    rule = {limit: 0.1 if "norm" in limit else 0.01}
    _served(model, keras.optimizers.SGD(0.3, **rule), max_staleness=1)
    model.fit(x, y, functions.BATCH, shuffle=False, verbose=0)
    expected = functions.network()
    delayed_loop.train(
        expected,
        keras.optimizers.SGD(0.3, **rule),
        keras.losses.MeanSquaredError(),
        [delayed_loop.batches(x, y, functions.BATCH)],
        0,
    )
    for one, other in zip(
        model.get_weights(), expected.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)


@pytest.mark.parametrize("engine", engines(usually="native"))
@pytest.mark.parametrize("num_servers", [0, 2])
def test_an_epoch_is_one_pass_of_all(cluster, engine, num_servers, tmp_path):
    # The loss is linear: weights are the sum of all gradients, in any order.
    ranks = cluster(engine, 2, num_servers=num_servers).run(
        functions.linear, 2, str(tmp_path)
    )
    x, y = functions.data(5 * functions.BATCH)
    batches = [b for b, _ in delayed_loop.batches(x, x, functions.BATCH)]
    rates = functions.RATES
    moved = -sum(rates) * sum(b.astype("float64").mean(0) for b in batches)
    counts = np.zeros(functions.WORDS)
    for batch in batches:
        np.add.at(counts, batch.reshape(-1), sum(rates) / len(batch))
    outputs = x @ moved - 2 * counts[x].sum(1)
    for weights, table, epochs, (evaluated, predicted), *_ in ranks:
        np.testing.assert_allclose(weights, moved, 1e-5)
        np.testing.assert_allclose(table, -np.tile(counts, (2, 1)).T, 1e-5)
        assert epochs == ranks[0][2]
        # All batches of all workers, once.
        assert epochs["label"] == pytest.approx(
            [y[:, 0].mean()] * len(rates), rel=1e-5
        )
        for loss in (epochs["val_loss"][-1], evaluated[0]):
            assert loss == pytest.approx(outputs.mean(), rel=1e-4)
        np.testing.assert_allclose(predicted, outputs, 1e-4)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.iterations) == 5 * len(rates)
    table = loaded.get_layer("rows").get_weights()[0]
    np.testing.assert_array_equal(table, ranks[0][1])
    _check_calls([result[4:] for result in ranks], len(rates), rates)


def _check_calls(ranks, num_epochs, rates):
    """Callbacks were called once on each rank; rank 0 has printed."""
    for calls, found, _ in ranks:
        for name in ("on_epoch_begin", "on_epoch_end"):
            assert calls[name] == num_epochs, calls
        for name in ("on_train_begin", "on_train_end"):
            assert calls[name] == 1, calls
        # `ReduceLROnPlateau` comes before, and has reduced it already.
        assert found == [rates[0], *[rates[2]] * (num_epochs - 1)]
    for name in ("on_train_batch_begin", "on_train_batch_end"):
        assert sum(calls.get(name, 0) for calls, *_ in ranks) == 5 * num_epochs
    printed, *others = [printed for *_, printed in ranks]
    epochs = re.findall(r"Epoch (\d)/3", printed)
    assert epochs == ["1", "2", "3"] and printed.count(" label:") == num_epochs
    assert others == [""] * len(others)


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("compensation", [None, 0.5])
def test_weights_and_gradients_travel_in_16_bits(wire, compensation):
    x, y = functions.data()
    rule = delayed_loop.RULES["adagrad"]
    begun, found, expected = [functions.network() for _ in range(3)]
    options = {"wire_dtype": wire, "delay_compensation": compensation}
    _served(found, rule(), max_staleness=1, **options)
    found.fit(x, y, functions.BATCH, shuffle=False, verbose=0)
    delayed_loop.train(
        *(expected, rule(), keras.losses.MeanSquaredError()),
        [delayed_loop.batches(x, y, functions.BATCH)],
        *(0, compensation or 0.0, wire),
    )
    one, other, before = (
        np.concatenate([w.reshape(-1) for w in model.get_weights()])
        for model in (found, expected, begun)
    )
    # Between two of 16 bits, a number may be rounded to either.
    assert np.isclose(one, other, 1e-5, 1e-6).mean() > 0.9
    moved = np.abs(other - before).max()
    assert moved > 0.01 and np.abs(one - other).max() < 0.01 * moved


@pytest.mark.parametrize(
    "num_servers, wire, size", [(0, None, 4), (2, None, 4), (2, "bfloat16", 2)]
)
def test_an_epochs_figures_are_reported(
    cluster, num_servers, wire, size, tmp_path, capsys
):
    ranks = cluster("native", 2, num_servers=num_servers).run(
        functions.reported, str(tmp_path), wire
    )
    for figures, number, version in ranks:
        assert figures == ranks[0][0]
        assert figures.version == version == 5 * functions.EPOCHS
        assert sum(figures.num_steps.values()) == 5
        assert sum(figures.staleness.values()) == 5
        assert set(figures.waiting_seconds) == set(figures.num_steps)
        assert {*figures.servers} == ({2, 3} if num_servers else {0, 1})
        traffic = figures.servers.values()
        assert {each.num_updates for each in traffic} == {5}
        num_bytes = 5 * number * size
        assert sum(each.pulled_bytes for each in traffic) == num_bytes
        assert sum(each.pushed_bytes for each in traffic) == num_bytes
    reports.show(str(tmp_path))
    assert "Version 10 of the weights" in capsys.readouterr().out
    events = event_accumulator.EventAccumulator(str(tmp_path / "architecture"))
    events.Reload()
    tags = set(events.Tags()["tensors"])
    assert {"staleness/of pushes", "staleness/largest", "version"} <= tags
    for name in ("pushed_bytes", "pulled_bytes", "num_updates"):
        assert {f"server {rank}/{name}" for rank in figures.servers} <= tags
    for name in ("waiting seconds", "steps"):
        assert {f"{name}/rank {rank}" for rank in figures.num_steps} <= tags


def test_the_end_of_an_epoch_is_that_of_all(cluster):
    ranks = cluster("native", 2).run(functions.unknown_length, 7)
    for totals, losses, weights in ranks:
        # Rank 1 stopped alone, in the second of five epochs: all end with it,
        # and rank 0 has trained on the rest of the data.
        assert totals == [7, 7]
        assert losses == ranks[0][1]
        for one, other in zip(weights, ranks[0][2], strict=True):
            np.testing.assert_array_equal(one, other)
    moving_mean = ranks[0][2][2]
    assert (moving_mean > 0.5).all()


def test_a_schedule_counts_updates_at_the_server():
    def rule():
        decay = keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
        return keras.optimizers.SGD(decay)

    x, y = functions.data()
    results = []
    for is_served in (True, False):
        model, optimizer = functions.dense(), rule()
        if is_served:
            _served(model, optimizer)
        else:
            model.compile(optimizer, "mse")
        model.fit(x.astype("float32"), y, shuffle=False, verbose=0, epochs=2)
        results.append(model.get_weights())
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)


@pytest.mark.parametrize("delay", ["bounded", "fixed"])
def test_without_staleness_training_is_synchronous(cluster, delay):
    for results in cluster("native", 2).run(functions.not_stale, delay):
        for one, other in zip(*results, strict=True):
            np.testing.assert_array_equal(one, other)


class Sometimes(keras.Sequential):
    """Applies the gradients of a batch whose first number is above 30."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((y - self(x)) ** 2)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)

        def apply():
            self.optimizer.apply(gradients, variables)
            return loss

        return {"loss": tf.cond(x[0, 0] > 30, apply, lambda: loss)}


def test_a_step_that_pushes_nothing_ends():
    x, found = np.arange(40, dtype="float32").reshape(20, 2), []
    for is_served in (True, False):
        keras.utils.set_random_seed(5)
        model = Sometimes([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(1e-4)
        if is_served:
            strategy = _served(model, optimizer, max_staleness=1)
        else:
            model.compile(optimizer, "mse")
        # Of five batches the last one.
        model.fit(x, x[:, :1], 4, epochs=2, shuffle=False, verbose=0)
        assert int(optimizer.iterations) == 2
        found.append(model.get_weights())
    assert strategy.staleness == {0: 1}
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-5)
