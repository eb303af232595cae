"""Keras's callbacks over several processes: decided alike, written once."""

import contextlib
import csv
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.callbacks import rank_zero
from tests import oracles
from tests.conftest import engines

ROWS, BATCH = 10, 4
EPOCHS = 3


def examples(count=10):
    rng = np.random.default_rng(2)
    ids = oracles.zipf_ids(rng, ROWS, (count, 3))
    return ids, rng.normal(size=(count, 1)).astype("float32")


def built(embedding=ks.layers.ShardedEmbedding):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,), dtype="int32")
    rows = embedding(ROWS, 2, name="words")(inputs)
    pooled = keras.layers.GlobalAveragePooling1D()(rows)
    return keras.Model(inputs, keras.layers.Dense(1)(pooled))


ARGUMENTS = {"loss": "mse", "metrics": ["mae", "mse"], "run_eagerly": True}


class Recorder(keras.callbacks.Callback):
    """All logs that a callback sees, by hook."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def _note(self, hook, logs):
        self.seen.append((hook, {k: float(v) for k, v in logs.items()}))

    def on_train_batch_end(self, batch, logs=None):
        self._note("train", logs)

    def on_test_batch_end(self, batch, logs=None):
        self._note("test", logs)

    def on_epoch_end(self, epoch, logs=None):
        self._note("epoch", logs)


def trained(model, callbacks, folder=None, **options):
    x, y = examples()
    # An uneven batch at the end, in training and in validation.
    return model.fit(
        x,
        y,
        batch_size=BATCH,
        shuffle=False,
        verbose=0,
        epochs=EPOCHS,
        validation_data=(x[:5], y[:5]),
        validation_batch_size=4,
        callbacks=callbacks,
        **options,
    )


class Steep(keras.callbacks.Callback):
    """Makes the loss rise from the second epoch on."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch:
            self.model.optimizer.learning_rate = 3.0


def all_callbacks(folder):
    path = str(folder)
    return {
        "recorder": Recorder(),
        "steep": Steep(),
        "checkpoint": keras.callbacks.ModelCheckpoint(
            f"{path}/{{epoch}}.keras"
        ),
        "best": keras.callbacks.ModelCheckpoint(
            f"{path}/best.weights.h5",
            save_best_only=True,
            save_weights_only=True,
            monitor="val_loss",
        ),
        "by batch": keras.callbacks.ModelCheckpoint(
            f"{path}/batch.weights.h5", save_weights_only=True, save_freq=2
        ),
        "csv": keras.callbacks.CSVLogger(f"{path}/log.csv"),
        "stop": keras.callbacks.EarlyStopping(
            monitor="loss", patience=0, restore_best_weights=True
        ),
    }


def run(model, folder):
    """What the callbacks made of one run."""
    callbacks = all_callbacks(folder)
    history = trained(model, list(callbacks.values()))
    x, y = examples()
    evaluated = model.evaluate(
        x, y, batch_size=BATCH, verbose=0, return_dict=True
    )
    return {
        "history": history.history,
        "logs": callbacks["recorder"].seen,
        "stopped": callbacks["stop"].stopped_epoch,
        "best": float(callbacks["best"].best),
        "evaluated": evaluated,
        "weights": model.get_weights(),
    }


def run_here(folder):
    with ks.HybridStrategy().scope():
        model = built()
        model.compile("sgd", **ARGUMENTS)
    return run(model, folder)


def assert_logs(got, expected):
    assert [hook for hook, _ in got] == [hook for hook, _ in expected]
    for (_, a), (_, b) in zip(got, expected, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_callbacks_as_on_one_process(cluster, engine, tmp_path):
    (tmp_path / "stock").mkdir()
    (tmp_path / "here").mkdir()
    stock = built(keras.layers.Embedding)
    stock.compile("sgd", **ARGUMENTS)
    expected = run(stock, tmp_path / "stock")
    results = cluster(engine, 2).run(run_here, str(tmp_path / "here"))
    assert results[0]["history"] == results[1]["history"]
    assert results[0]["logs"] == results[1]["logs"]
    assert results[0]["evaluated"] == results[1]["evaluated"]
    assert expected["stopped"] == 1  # before the last epoch
    for result in results:
        assert_logs(result["logs"], expected["logs"])
        assert result["stopped"] == expected["stopped"]
        assert result["best"] == pytest.approx(expected["best"], rel=1e-5)
        assert result["evaluated"] == pytest.approx(
            expected["evaluated"], rel=1e-5
        )
        for key, values in expected["history"].items():
            assert result["history"][key] == pytest.approx(values, rel=1e-5)
        for a, b in zip(result["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    # Written once, and whole.
    names = sorted(os.listdir(tmp_path / "here"))
    assert names == sorted(os.listdir(tmp_path / "stock"))
    assert names == [
        "1.keras",
        "2.keras",
        "batch.weights.h5",
        "best.weights.h5",
        "log.csv",
    ]
    logs = [
        list(
            csv.DictReader(
                (tmp_path / where / "log.csv").read_text().splitlines()
            )
        )
        for where in ("here", "stock")
    ]
    for row, want in zip(*logs, strict=True):
        assert row.keys() == want.keys()
        for key, value in want.items():
            assert float(row[key]) == pytest.approx(float(value), rel=1e-5)
    loaded = built()
    for name in ("best", "batch"):
        loaded.load_weights(tmp_path / "here" / f"{name}.weights.h5")
        stock.load_weights(tmp_path / "stock" / f"{name}.weights.h5")
        for a, b in zip(loaded.get_weights(), stock.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    whole = keras.models.load_model(tmp_path / "here" / "2.keras")
    assert whole.count_params() == stock.count_params()


# Callbacks that change the course, and those that only watch.


def test_orbax_is_refused(monkeypatch):
    """It is not installed, and older versions of Keras have none."""

    class Orbax(keras.callbacks.Callback):
        pass

    name = "OrbaxCheckpoint"
    monkeypatch.setattr(keras.callbacks, name, Orbax, raising=False)
    with pytest.raises(ValueError, match="OrbaxCheckpoint.*ShardedCheckpoint"):
        rank_zero.on_rank([Orbax()], 0)


def run_more(folder):
    """ReduceLROnPlateau, TerminateOnNaN and TensorBoard."""
    results = {}
    strategy = ks.HybridStrategy()
    x, y = examples()

    def compiled(**options):
        with strategy.scope():
            model = built()
            model.compile("sgd", **{**ARGUMENTS, **options})
        return model

    model = compiled(run_eagerly=False)
    reduce = keras.callbacks.ReduceLROnPlateau(
        monitor="loss", factor=0.5, patience=0, min_delta=100.0
    )
    callbacks = [reduce]
    if folder:
        callbacks.append(
            keras.callbacks.TensorBoard(folder, update_freq="batch")
        )
    trained(model, callbacks)
    results["learning rate"] = float(model.optimizer.learning_rate)
    # NaN in one rank's part of the second batch only.
    y = y.copy()
    y[BATCH] = np.nan
    model = compiled()
    recorder = Recorder()
    model.fit(
        x,
        y,
        batch_size=BATCH,
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.TerminateOnNaN(), recorder],
    )
    results["steps"] = len([h for h, _ in recorder.seen if h == "train"])
    return results


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_callbacks_decide_alike(cluster, engine, tmp_path):
    has_tensorboard = True
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        has_tensorboard = False
    folder = str(tmp_path / "logs") if has_tensorboard else None
    first, second = cluster(engine, 2).run(run_more, folder)
    assert first == second
    assert first["learning rate"] == pytest.approx(0.01 * 0.5 ** (EPOCHS - 1))
    assert first["steps"] == 2
    if folder:
        for part in ("train", "validation"):
            files = os.listdir(tmp_path / "logs" / part)
            events = [f for f in files if "tfevents" in f]
            assert len(events) == 1, files


# A gradient that is not a number, on one rank.

_POISON = 5


@keras.saving.register_keras_serializable(package="tests")
class Poison(keras.layers.Layer):
    """Hands vectors on; the gradient of those of one id is NaN."""

    def call(self, vectors, ids):
        @tf.custom_gradient
        def poisoned(vectors):
            def gradient(upstream):
                is_poison = tf.equal(ids, _POISON)[..., tf.newaxis]
                return tf.where(is_poison, np.nan, upstream)

            return vectors, gradient

        return poisoned(vectors)


def train_with_nan(terminate):
    """The losses of each batch and the table afterwards."""
    # Rank 1's part of the second batch has the id, and rank 0's of the fourth.
    ids = np.tile([[0, 1], [2, 3], [1, 0], [3, 2]], [5, 1])
    ids[6], ids[12] = _POISON, _POISON
    y = np.linspace(0, 1, len(ids))[:, np.newaxis]
    inputs = keras.Input([2], dtype="int32")
    vectors = ks.layers.ShardedEmbedding(8, 3, "ones", name="t")(inputs)
    outputs = keras.layers.Flatten()(Poison()(vectors, inputs))
    outputs = keras.layers.Dense(1, kernel_initializer="ones")(outputs)
    model = keras.Model(inputs, outputs)
    with ks.HybridStrategy().scope():
        model.compile("adam", "mse")
    losses = []
    record = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
    )
    stop = [keras.callbacks.TerminateOnNaN()] if terminate else []
    model.fit(ids, y, 4, shuffle=False, verbose=0, callbacks=[record, *stop])
    return losses, ks.export(model).get_weights()


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_a_nan_gradient_on_one_rank_reaches_all_alike(cluster, engine):
    # As stock Keras: it trains on, with NaN in what the gradient reaches.
    expected, weights = train_with_nan(False)
    assert np.isnan(expected).tolist() == [False, False, False, True, True]
    for losses, found in cluster(engine, 2).run(train_with_nan, False):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for a, b in zip(found, weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    for losses, _ in cluster(engine, 2).run(train_with_nan, True):
        np.testing.assert_allclose(losses, expected[:4], rtol=1e-5)


# Predictions.


def predictions():
    with ks.HybridStrategy().scope():
        model = built()
        model.compile("sgd", loss="mse", steps_per_execution=2)
    x, _ = examples(9)
    results = {(9, 4): model.predict(x, batch_size=4, verbose=0)}
    with ks.HybridStrategy().scope():
        model.compile("sgd", loss="mse", run_eagerly=True)
    for count, batch in ((9, 2), (1, 1), (3, 8)):
        results[count, batch] = model.predict(
            x[:count], batch_size=batch, verbose=0
        )
    results["on batch"] = model.predict_on_batch(x[:1])
    return results


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_predictions_are_whole_and_in_order(cluster, engine):
    expected = built(keras.layers.Embedding).predict(examples(9)[0], verbose=0)
    for results in cluster(engine, 2).run(predictions):
        for case, outputs in results.items():
            count = case[0] if isinstance(case, tuple) else 1
            assert outputs.shape == (count, 1)
            np.testing.assert_allclose(
                outputs, expected[:count], rtol=1e-5, err_msg=str(case)
            )


# Calls on one rank only, and what cannot work.


def call_on_one_rank():
    with ks.HybridStrategy().scope():
        model = built()
        model.compile("sgd", **ARGUMENTS)
    x, y = examples()
    calls = {
        "fit": lambda: model.fit(x, y, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
    }
    names = list(calls)
    messages = []
    for name in names:
        other = names[(names.index(name) + 1) % 3]
        rank = ks.collectives.current().rank
        try:
            calls[name if rank == 0 else other]()
        except ValueError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_other_methods_on_other_ranks_are_an_error(cluster, engine):
    for messages in cluster(engine, 2).run(call_on_one_rank):
        assert len(messages) == 3
        for message in messages:
            assert "ks.export(model)" in message


def test_ranks_that_write():
    csv_logger = keras.callbacks.CSVLogger("unused.csv")
    stop = keras.callbacks.EarlyStopping()
    assert rank_zero.on_rank([csv_logger, stop], 0) == [csv_logger, stop]
    assert rank_zero.on_rank([csv_logger, stop], 1) == [stop]


def back_up(folder):
    """The error, and the steps of a `fit` without the callback."""
    with ks.HybridStrategy().scope():
        model = built()
        model.compile("sgd", **ARGUMENTS)
    backup = keras.callbacks.BackupAndRestore(folder)
    x, y = examples()
    with pytest.raises(ValueError) as error:
        model.fit(x, y, verbose=0, callbacks=[backup])
    model.fit(x, y, batch_size=len(x), verbose=0)
    return str(error.value), int(model.optimizer.iterations)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_refuses_a_callback_of_one_process(cluster, engine, tmp_path):
    for message, iterations in cluster(engine, 2).run(back_up, str(tmp_path)):
        assert "BackupAndRestore" in message
        assert "ks.callbacks.ShardedCheckpoint" in message
        assert iterations == 1
    assert not list(tmp_path.iterdir())


def test_one_process_takes_every_callback(tmp_path):
    with ks.HybridStrategy().scope():
        model = built()
        model.compile("adam", **ARGUMENTS)
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    trained(model, [backup])
    assert int(model.optimizer.iterations) == 3 * EPOCHS


class Sayer(keras.callbacks.Callback):
    """Says something in the middle of each epoch, and fails in the last."""

    def __init__(self, is_failing):
        super().__init__()
        self.is_failing = is_failing

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            rank_zero.say(f"said in epoch {self.epoch}")
        if batch == 2 and self.epoch == 1 and self.is_failing:
            raise RuntimeError("of the test")


@pytest.mark.parametrize(
    ("is_failing", "is_listed"), [(False, False), (True, False), (False, True)]
)
def test_lines_do_not_tear_a_progress_bar(capsys, is_failing, is_listed):
    """Also where the user makes the `CallbackList`, and its bar."""
    model = built()
    with ks.HybridStrategy().scope():
        model.compile("sgd", "mse")
    x, y = examples(16)
    callbacks = [Sayer(is_failing)]
    if is_listed:
        callbacks = keras.callbacks.CallbackList(
            callbacks,
            add_history=True,
            add_progbar=True,
            model=model,
            verbose=1,
            epochs=2,
            steps=4,
        )
    expected = pytest.raises(RuntimeError, match="of the test")
    with expected if is_failing else contextlib.nullcontext():
        model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=2,
            verbose=1,
            callbacks=callbacks,
        )
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "said" in line] == [
        "said in epoch 0",
        "said in epoch 1",
    ]
    # Behind the whole bar of its epoch, before the next one's.
    place = lines.index("said in epoch 0")
    assert "4/4" in lines[place - 1]
    assert lines[place + 1] == "Epoch 2/2"
    assert lines.index("said in epoch 1") == len(lines) - 1
