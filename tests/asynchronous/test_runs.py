"""Logs, results and ends of epochs are those of all workers."""

import contextlib
import io
import time
import warnings
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.asynchronous.store import Store
from tests import asynchronous_functions as functions

WITHIN = ["evaluate", "predict", "test_on_batch", "predict_on_batch"]
SAVES = {"save": "{}.keras", "save_weights": "{}.weights.h5"}


def _compiled(model, optimizer="sgd", loss="mse", **options):
    strategy = ks.HybridStrategy(synchronous=False, max_staleness=1)
    with strategy.scope():
        model.compile(optimizer, loss, **options)
    return strategy


def _data():
    x, y = functions.data()
    return x.astype("float32"), y


def _at_batch(function):
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: function()
    )


def _fit(model, *callbacks, **options):
    options = {"epochs": 2, "shuffle": False, "verbose": 0} | options
    return model.fit(*_data(), functions.BATCH, callbacks=callbacks, **options)


def test_metrics_read_within_an_epoch_do_not_end_it():
    found = []
    for is_served in (True, False):
        model, losses = functions.dense(), []
        if is_served:
            _compiled(model)
        else:
            model.compile("sgd", "mse")
        read = _at_batch(
            lambda model=model, losses=losses: losses.append(
                float(model.get_metrics_result()["loss"])
            )
        )
        history = _fit(model, read).history
        found.append((losses, history["loss"], *model.get_weights()))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-5)


def within_an_epoch(is_traced, folder):
    """What calls within an epoch raise, and the history of that `fit`."""
    model = functions.dense()
    _compiled(model)
    x, y = _data()
    if is_traced:
        model.evaluate(x, y, verbose=0)
    errors = {}

    def call():
        for name in WITHIN:
            labels = () if "predict" in name else (y,)
            with pytest.raises(ValueError) as error:
                getattr(model, name)(x, *labels)
            errors[name] = str(error.value)
        for name, path in SAVES.items():
            with pytest.raises(ValueError) as error:
                getattr(model, name)(f"{folder}/{path.format('within')}")
            errors[name] = str(error.value)

    def save(epoch, logs):
        for name, path in SAVES.items():
            getattr(model, name)(f"{folder}/{path.format('between')}")

    between = keras.callbacks.LambdaCallback(save, save)
    calls = _at_batch(call), between
    history = _fit(model, *calls, validation_data=(x, y)).history
    return errors, history, model.get_weights()


@pytest.mark.parametrize("num_servers", [0, 1])
@pytest.mark.parametrize("is_traced", [False, True])
def test_evaluation_within_an_epoch_is_refused(
    cluster, num_servers, is_traced, tmp_path
):
    model = functions.dense()
    model.compile("sgd", "mse")
    expected = _fit(model, validation_data=_data()).history
    ranks = cluster("native", 1, num_servers=num_servers)
    for rank, (errors, history, weights) in enumerate(
        ranks.run(within_an_epoch, is_traced, str(tmp_path))
    ):
        assert list(errors) == ([] if rank else [*WITHIN, *SAVES])
        for name, error in errors.items():
            assert f"`model.{name}` within an epoch" in error
        for name, values in expected.items():
            np.testing.assert_allclose(history[name], values, 1e-5)
        for one, other in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_allclose(one, other, 1e-5, 1e-6)
    assert len(list(tmp_path.glob("between*"))) == len(SAVES)
    assert not list(tmp_path.glob("within*"))


class OwnStep(keras.Sequential):
    """Its logs are of the step alone: no metric has computed "kl"."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(y - self(x)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        parts = {"first": y[0, 0]}
        return {"loss": loss, "kl": keras.ops.mean(y), "parts": parts}


class LastLogs(keras.callbacks.Callback):
    """Keeps the last logs of each epoch; {} of one without a step here."""

    def __init__(self):
        super().__init__()
        self.of_epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.of_epochs.append({})

    def on_train_batch_end(self, batch, logs=None):
        self.of_epochs[-1] = logs


def own_logs():
    """The logs of each epoch's last step here, and the history."""
    model, last = OwnStep(functions.dense().layers), LastLogs()
    _compiled(model)
    stop = keras.callbacks.EarlyStopping("kl", mode="min", patience=1)
    return last.of_epochs, _fit(model, last, stop, epochs=4).history


@pytest.mark.parametrize("num_servers", [0, 1])
def test_logs_that_no_metric_computes_are_means_of_workers(
    cluster, num_servers
):
    ranks = cluster("native", 2, num_servers=num_servers).run(own_logs)
    histories = [history for _, history in ranks]
    for name in ("loss", "kl", "first"):
        # Of the workers that took a batch of the epoch, by epochs.
        expected = [
            np.mean([logs[name] for logs in of_epoch if logs])
            for of_epoch in zip(*(last for last, _ in ranks), strict=True)
        ]
        for history in histories:
            np.testing.assert_allclose(history[name], expected, 1e-6)


def test_logs_of_one_worker_are_those_of_stock_keras():
    found = []
    for is_served in (True, False):
        model = OwnStep(functions.dense().layers)
        if is_served:
            _compiled(model)
        else:
            model.compile("sgd", "mse")
        found.append(_fit(model).history)
    assert set(found[0]) == set(found[1])
    for name in ("loss", "kl", "first"):
        np.testing.assert_allclose(found[0][name], found[1][name], 1e-5)


class Kinds(keras.metrics.Metric):
    """The number of updates, combined as `aggregation` says."""

    def __init__(self, aggregation):
        super().__init__(name=aggregation)
        self.count = self.add_variable(
            (), keras.initializers.Zeros(), aggregation=aggregation
        )

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.count.assign(self.count + 1)

    def result(self):
        return self.count


KINDS = ["sum", "mean", "only_first_replica"]


def one_batch():
    """Metrics of an epoch of which one worker takes no batch."""
    strategy = ks.HybridStrategy(synchronous=False, max_staleness=1)
    model = functions.dense()
    with strategy.scope():
        model.compile("sgd", "mse", metrics=[Kinds(kind) for kind in KINDS])
    x, y = _data()
    size, noted = functions.BATCH, LastLogs()
    history = model.fit(
        *(x[:size], y[:size], size), epochs=6, callbacks=[noted], verbose=0
    )
    return [bool(logs) for logs in noted.of_epochs], history.history


def test_metrics_are_those_of_workers_that_took_a_batch(cluster):
    ranks = cluster("native", 2).run(one_batch)
    # One of them alone, in each epoch.
    assert np.sum([took for took, _ in ranks], 0).tolist() == [1] * 6
    for _, history in ranks:
        for kind in KINDS:
            assert history[kind] == [1] * 6


class WithScores(keras.Model):
    """Its own step updates a metric that makes its variables then."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3, "softmax", kernel_initializer="ones")
        self.mean = keras.metrics.Mean(name="loss")
        self.scores = keras.metrics.F1Score(name="scores")  # of each class

    metrics = property(lambda self: [self.mean, self.scores])

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x)
            losses = keras.losses.categorical_crossentropy(y, outputs)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.mean.update_state(loss)
        self.scores.update_state(y, outputs)
        return {metric.name: metric.result() for metric in self.metrics}


def scored(is_served=True):
    """The history of epochs of one batch, which the last worker takes."""
    model, random, seconds = WithScores(), np.random.default_rng(0), 0
    if is_served:
        ranks = _compiled(model).collectives
        seconds = 0.5 if ranks.rank < ranks.num_workers - 1 else 0
    else:
        model.compile("sgd")
    take = Store.take

    def late(store, record):
        time.sleep(seconds)
        return take(store, record)

    x = random.normal(size=(20, 5)).astype("float32")
    y = np.eye(3, dtype="float32")[random.integers(0, 3, 20)]
    with mock.patch.object(Store, "take", late):
        return model.fit(x, y, 20, 3, verbose=0).history


@pytest.mark.parametrize("num_workers, num_servers", [(1, 1), (2, 0)])
def test_metrics_that_not_all_ranks_have(cluster, num_workers, num_servers):
    expected = scored(is_served=False)
    ranks = cluster("native", num_workers, num_servers=num_servers).run(scored)
    for history in ranks:
        assert set(history) == set(expected)
        for name, values in history.items():
            np.testing.assert_allclose(values, expected[name], 1e-5)


class StopAtEnd(keras.callbacks.Callback):
    """One rank stops behind the second epoch, as by its own clock."""

    def __init__(self, is_stopping):
        super().__init__()
        self._is_stopping = is_stopping

    def on_epoch_end(self, epoch, logs=None):
        if self._is_stopping and epoch == 1:
            self.model.stop_training = True


def stopped():
    model = functions.dense()
    strategy = _compiled(model)
    stop = StopAtEnd(strategy.rank == 1)
    return _fit(model, stop, epochs=5).history["loss"]


@pytest.mark.parametrize("num_servers", [0, 1])
def test_one_worker_ends_the_training_of_all(cluster, num_servers):
    ranks = cluster("native", 2, num_servers=num_servers).run(stopped)
    assert len(ranks[0]) == 2
    assert all(losses == ranks[0] for losses in ranks)


class Reporting(keras.callbacks.CSVLogger):
    """Notes that it was called."""

    def __init__(self, path):
        super().__init__(path)
        self.calls = []

    def on_test_end(self, logs=None):
        self.calls.append("evaluate")

    def on_predict_end(self, logs=None):
        self.calls.append("predict")


def evaluated(path):
    """Results of data that are each rank's own, calls, and what it printed."""
    model = functions.dense()
    strategy = _compiled(model)
    x, y = _data()
    y = y + strategy.rank
    history = _fit(model, validation_data=(x, y)).history
    report, printed = Reporting(path), io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = model.evaluate(x, y, verbose=2, callbacks=[report])
        model.predict(x, verbose=2, callbacks=report)
    return history["val_loss"], result, report.calls, printed.getvalue()


@pytest.mark.parametrize("num_servers", [0, 1])
def test_evaluation_is_the_first_workers(cluster, num_servers, tmp_path):
    ranks = cluster("native", 2, num_servers=num_servers).run(
        evaluated, str(tmp_path / "unused.csv")
    )
    (losses, result, calls, printed), *others = ranks
    assert losses[-1] == pytest.approx(result)
    assert calls == ["evaluate", "predict"] and " loss: " in printed
    for number, other in enumerate(others):
        is_worker = number == 0
        assert other == (losses, result, calls if is_worker else [], "")


def frozen():
    """A model whose moving averages alone are made by training."""
    model = functions.dense()
    model.add(keras.layers.BatchNormalization(momentum=0.5))
    model.trainable = False
    model.layers[-1].trainable = True
    return model


def without_pushes():
    model = frozen()
    strategy = _compiled(model, metrics=["mae"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is trained
        history = _fit(model).history
    num_steps = strategy.epoch_figures.num_steps.values()
    return history, model.get_weights()[-2:], sum(num_steps), strategy.staleness


@pytest.mark.parametrize("num_servers", [0, 1])
@pytest.mark.filterwarnings("ignore:The model does not have any trainable")
def test_steps_that_push_nothing_count(cluster, num_servers):
    ranks = cluster("native", 2, num_servers=num_servers).run(without_pushes)
    model = frozen()
    model.compile("sgd", "mse", metrics=["mae"])
    expected = _fit(model).history
    for history, averages, num_steps, staleness in ranks:
        for name in ("loss", "mae"):
            np.testing.assert_allclose(history[name], expected[name], 1e-5)
        for one, other in zip(averages, ranks[0][1], strict=True):
            np.testing.assert_array_equal(one, other)
            assert np.abs(one - round(one.mean())).max() > 0.01
        assert num_steps == 5 and not staleness


class Exporting(keras.Sequential):
    """Notes each call of its `export`."""

    num_exports = 0

    def export(self, *args, **options):
        self.num_exports += 1
        super().export(*args, **options)


def exported(folder):
    """Calls of `export`, what each rank reads of it, and predictions."""
    model = Exporting(functions.dense().layers)
    _compiled(model)
    _fit(model, epochs=1)
    model.export(folder, verbose=False)
    x, _ = _data()
    served = tf.saved_model.load(folder)
    outputs = served.serve(x).numpy()
    return model.num_exports, outputs, model.predict(x, verbose=0)


@pytest.mark.parametrize("num_servers", [0, 1])
def test_one_rank_exports(cluster, num_servers, tmp_path):
    ranks = cluster("native", 2, num_servers=num_servers).run(
        exported, str(tmp_path / "served")
    )
    assert [calls for calls, *_ in ranks] == [1, *[0] * (1 + num_servers)]
    for _, outputs, predicted in ranks:
        np.testing.assert_allclose(outputs, predicted, 1e-5)


def test_one_process_takes_every_callback(tmp_path):
    model = functions.dense()
    _compiled(model)
    path = tmp_path / "backup"
    boards = keras.callbacks.TensorBoard(tmp_path / "logs", embeddings_freq=1)

    class Fails(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("of the test")

    with pytest.raises(RuntimeError, match="of the test"):
        _fit(model, keras.callbacks.BackupAndRestore(path), Fails())
    backup = keras.callbacks.BackupAndRestore(path)
    assert _fit(model, backup, boards).epoch == [1]


class OwnFit(keras.Sequential):
    """A `fit` and `evaluate` of the user's, with arguments of their own."""

    def fit(self, data, **given):
        return super().fit(*data, **given)

    def evaluate(self, *args, **given):
        return super().evaluate(*args, **given)


def test_a_fit_of_the_models_class_calls_that_of_all():
    model = OwnFit(functions.dense().layers)
    _compiled(model)
    options = {"batch_size": functions.BATCH, "shuffle": False, "verbose": 0}
    found = model.fit(_data(), validation_data=_data(), **options).history
    expected = functions.dense()
    expected.compile("sgd", "mse")
    expected = _fit(expected, epochs=1, validation_data=_data()).history
    for name in ("loss", "val_loss"):
        np.testing.assert_allclose(found[name], expected[name], 1e-5)
    with pytest.raises(ValueError, match="steps_per_epoch=1"):
        model.fit(_data(), steps_per_epoch=1)


def test_callbacks_of_a_fit_of_the_models_class_are_looked_at():
    strategy = ks.HybridStrategy(
        synchronous=False, max_staleness=1, delay="fixed"
    )
    with strategy.scope():
        model = OwnFit(functions.dense().layers)
        model.compile("sgd", "mse")
    checkpoint = ks.callbacks.ShardedCheckpoint("unused", every_steps=3)
    with pytest.raises(ValueError, match="every_steps=3"):
        model.fit(_data(), callbacks=[checkpoint], verbose=0)


class Every(keras.callbacks.Callback):
    """A callback of the user's, with attributes of these names."""

    every_steps = every_seconds = save_freq = 3


def test_own_callbacks_are_not_refused_by_names_of_attributes():
    model = functions.dense()
    _compiled(model)
    assert len(_fit(model, Every()).history["loss"]) == 2
