"""Interrupted trainings end as undisturbed ones; damage is found."""

import json
import os
import pathlib
import shutil

import h5py
import keras
import numpy as np
import pytest

import keras_sparsity as ks
from keras_sparsity.checkpoint import folder, index, state, storage
from tests import checkpoint_functions as functions
from tests.conftest import engines

STEPS = functions.NUM_EXAMPLES // functions.BATCH


def assert_same(left, right):
    """Two results of `functions.train`, to the bit."""
    for ours, theirs in zip(left[:2], right[:2], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)
    assert left[2:] == right[2:]


def assert_close(left, right):
    for ours, theirs in zip(left[:2], right[:2], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6)


# Exactly where it stopped.


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_resumed_training_equals_an_undisturbed_one(cluster, engine, tmp_path):
    results = cluster(engine, 2).run(
        functions.train_and_resume, tmp_path, [13, STEPS]
    )
    for undisturbed, resumed in results:
        assert_same(undisturbed, resumed)
    # Without the checkpoint it is not so: the weights say what was trained.
    other = cluster(engine, 2).run(_train_without_the_second_epoch)[0]
    assert not np.array_equal(other[0][0], results[0][0][0][0])


def _train_without_the_second_epoch():
    return functions.train(epochs=functions.EPOCHS - 1)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize(
    "kind",
    ["arrays", "dataset", "repeated", "unknown length", "generator", "batches"],
)
def test_every_input_goes_on_where_it_stopped(tmp_path, kind):
    undisturbed, resumed = functions.train_and_resume(
        tmp_path, [12], kind=kind, epochs=3
    )
    assert_same(undisturbed, resumed)


class _At(keras.callbacks.Callback):
    """Ends a training at the end of an epoch, or after a number of steps."""

    def __init__(self, num_steps=None):
        super().__init__()
        self._num_steps, self._num_done = num_steps, 0

    def on_train_batch_end(self, batch, logs=None):
        self._num_done += 1
        self.model.stop_training = self._num_done == self._num_steps

    def on_epoch_end(self, epoch, logs=None):
        if self._num_steps is None:
            raise functions.Interruption


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_an_epoch_without_a_step_of_its_own_has_logs(tmp_path):
    """Its last step was saved as if more would follow: nobody knows them."""
    arguments = {"kind": "unknown length", "epochs": 2}
    undisturbed = functions.train(**arguments)
    arguments |= {"directory": tmp_path, "every_steps": 1}
    assert functions.train(callbacks=[_At()], **arguments) is None
    assert_same(undisturbed, functions.train(**arguments))


def test_a_stop_within_an_epoch_leaves_its_rest(tmp_path):
    undisturbed = functions.train()
    functions.train(tmp_path, every_steps=None, callbacks=[_At(STEPS + 3)])
    assert_same(undisturbed, functions.train(tmp_path, every_steps=None))


def test_a_stop_at_the_last_step_of_an_epoch_leaves_the_others(tmp_path):
    undisturbed = functions.train()
    functions.train(tmp_path, callbacks=[_At(STEPS)])
    assert_same(undisturbed, functions.train(tmp_path))


def test_a_schedule_that_goes_on_from_the_present_rate(tmp_path):
    """Interrupted behind an epoch's first step, and within the third."""

    def callbacks():
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        ]

    undisturbed = functions.train(callbacks=callbacks())
    for number in (STEPS, STEPS + 3, None):
        resumed = functions.train(
            tmp_path, interrupt_after=number, callbacks=callbacks()
        )
    assert_same(undisturbed, resumed)
    # One more epoch begins with another rate.
    epochs = functions.EPOCHS + 1
    longer = functions.train(tmp_path, epochs=epochs, callbacks=callbacks())
    assert_same(functions.train(epochs=epochs, callbacks=callbacks()), longer)


def test_what_layers_have_adapted_to_comes_back(tmp_path):
    x = np.arange(8, dtype="float32")[:, None]
    found = []
    for is_first in (True, False):
        norm = keras.layers.Normalization()
        norm.build((None, 1))
        if is_first:
            norm.adapt(x)
        dense = keras.layers.Dense(1)
        model = keras.Sequential([keras.Input((1,)), norm, dense])
        with ks.HybridStrategy().scope():
            model.compile("sgd", "mse")
        checkpoint = ks.callbacks.ShardedCheckpoint(tmp_path)
        if is_first:
            model.fit(x, x, verbose=0, callbacks=[checkpoint])
        else:
            checkpoint.restore(model)
        found.append(model.predict(x, verbose=0))
    np.testing.assert_array_equal(*found)


# Keras 3.5 says so wherever the last execution of an epoch is a shorter one.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.smoke
def test_several_steps_per_execution(tmp_path):
    arguments = {"steps_per_execution": 3, "kind": "dataset"}
    undisturbed, resumed = functions.train_and_resume(
        tmp_path, [2, 2], **arguments
    )
    assert_same(undisturbed, resumed)


def test_unseeded_arrays_go_on_in_their_order(tmp_path):
    """Each example is seen once in an epoch, also in the interrupted one."""
    keras.utils.set_random_seed(1)
    seen = []

    class Sum(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="sum")
            self.total = self.add_variable((), "zeros", name="total")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.total.assign_add(keras.ops.sum(y_true))

        def result(self):
            return self.total

    def joined(model, directory):
        checkpoint = ks.callbacks.ShardedCheckpoint(directory)
        try:
            return checkpoint.join(model, [checkpoint], 1, order_seed=5)
        finally:
            checkpoint.end()

    def fit(*callbacks):
        import tensorflow as tf

        tf.random.set_seed(87654321)  # as good as none
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        with ks.HybridStrategy(architecture="hybrid").scope():
            model.compile("sgd", "mse", metrics=[Sum()])
        x = 2.0 ** np.arange(12)[:, None]
        checkpoint = ks.callbacks.ShardedCheckpoint(tmp_path, every_steps=1)
        history = model.fit(
            x / x.max(),
            x,
            batch_size=1,
            epochs=2,
            verbose=0,
            callbacks=[checkpoint, *callbacks],
        )
        seen.extend(history.history["sum"])
        return model

    with pytest.raises(functions.Interruption):
        fit(functions.InterruptAfter(17))
    (name, *_) = folder.complete(tmp_path)
    first = index.read(os.path.join(tmp_path, name))
    model = fit()
    # Each power of two once: none twice, none left out.
    assert seen == [2.0**12 - 1] * 2
    # A process that joins a resumed training has the order of its first run.
    assert joined(model, tmp_path) == first["position"]["order_seed"] != 5
    assert joined(model, tmp_path / "new") == 5


def test_early_stopping_is_not_trained_past(tmp_path):
    def stop():
        return keras.callbacks.EarlyStopping(
            monitor="loss", patience=0, min_delta=100.0
        )

    once = functions.train(tmp_path, callbacks=[stop()], epochs=9)
    again = functions.train(tmp_path, callbacks=[stop()], epochs=9)
    assert len(once[3]["loss"]) == 2
    assert_same(once, again)


def test_a_training_that_has_ended_keeps_the_weights_of_its_end(tmp_path):
    """Not the averages, which Keras would set once more."""

    def ended():
        stop = keras.callbacks.EarlyStopping(
            monitor="loss",
            patience=0,
            min_delta=100.0,
            restore_best_weights=True,
        )
        optimizer = keras.optimizers.Adam(use_ema=True)
        return functions.train(
            tmp_path, callbacks=[stop], epochs=9, optimizer=optimizer
        )

    assert_same(ended(), ended())


def test_more_epochs_go_on_from_the_end(tmp_path):
    functions.train(tmp_path, epochs=2)
    longer = functions.train(tmp_path, epochs=4)
    assert_same(functions.train(epochs=4), longer)


def test_a_fit_without_epochs_saves_nothing(tmp_path):
    functions.train(tmp_path, epochs=0)
    assert not folder.complete(tmp_path)
    assert_same(functions.train(), functions.train(tmp_path))


def test_csv_log_keeps_what_it_has(tmp_path):
    path = tmp_path / "log.csv"
    directory = tmp_path / "checkpoints"
    for interruption in (2 * STEPS + 3, None):
        log = keras.callbacks.CSVLogger(path)
        functions.train(
            directory, interrupt_after=interruption, callbacks=[log]
        )
        if interruption:
            log.on_train_end()  # closes the file, as the process's end does
    lines = path.read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "epoch",
        *map(str, range(functions.EPOCHS)),
    ]


# On other numbers of processes and partitions.


# Servers go on with other numbers, and so do kept rows.
@pytest.mark.all_cells
@pytest.mark.parametrize("before, after", [(1, 2), (2, 1)])
def test_other_numbers_of_processes_and_partitions(
    cluster, before, after, tmp_path
):
    plain = {"dropout": 0.0}

    def run(size, *args, **arguments):
        if size == 1:
            return functions.train(*args, **arguments)
        return cluster("native", size).run(
            _call, functions.train, args, arguments
        )[0]

    undisturbed = run(after, partitions=(4, 2), **plain)
    run(before, tmp_path, interrupt_after=STEPS + 4, every_steps=1, **plain)
    resumed = run(after, tmp_path, partitions=(4, 2), **plain)
    assert_close(undisturbed, resumed)
    np.testing.assert_allclose(
        undisturbed[3]["accuracy"], resumed[3]["accuracy"], rtol=1e-5
    )


def test_saved_by_four_processes_loads_in_any_number(cluster, tmp_path):
    """The same predictions and the same next step, sharded or plain.

    On one engine: files know of none.
    """
    expected, *others = cluster("native", 4).run(functions.save, tmp_path)
    loaded = [
        functions.load(tmp_path, kind)
        for kind in ("saved", "checkpoint", "plain")
    ]
    for size, kind in ((2, "saved"), (3, "checkpoint"), (3, "saved")):
        loaded += cluster("native", size).run(functions.load, tmp_path, kind)
    for predictions, weights in [*others, *loaded]:
        np.testing.assert_allclose(predictions, expected[0], atol=1e-6)
        for one, other in zip(weights, expected[1], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def _call(function, args, arguments):
    return function(*args, **arguments)


@pytest.mark.parametrize("source", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("target", [1, 2, 4, 7, 16])
def test_rows_move_between_partitions(tmp_path, source, target):
    rows = np.arange(13 * 2, dtype="float32").reshape(13, 2)
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        for partition in range(source):
            file[str(partition)] = rows[partition::source]
    for partition in range(target):
        variable = keras.Variable(np.full_like(rows[partition::target], -1))
        with h5py.File(tmp_path / "rows.h5") as file:
            for each in range(source):
                state.read_rows(
                    file[str(each)],
                    (each, source),
                    variable,
                    (partition, target),
                    len(rows),
                )
        np.testing.assert_array_equal(variable, rows[partition::target])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("shape", [(), (3,), (4, 2), (0, 2)])
def test_any_variable_is_stored_as_it_is(tmp_path, monkeypatch, dtype, shape):
    monkeypatch.setattr(state, "_BLOCK_BYTES", 8)  # several blocks
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 5
    variable = keras.Variable(values.astype("float32"), dtype=dtype)
    other = keras.Variable(np.zeros(shape), dtype=dtype)
    with h5py.File(tmp_path / "one.h5", "w") as file:
        state.write(file, "0", variable)
        state.read(file["0"], other)
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(other), keras.ops.convert_to_numpy(variable)
    )


def test_no_rank_holds_a_table_for_it(cluster, tmp_path):
    results = cluster("native", 2).run(
        functions.peak_memory, tmp_path, 1_000_000, 32
    )
    for part, saving, restoring in results:
        assert part > 60  # MiB
        # A block, and what HDF5 needs.
        assert saving < part / 2
        assert restoring < part / 2


# When it goes wrong.


def test_a_full_disk_ends_all_ranks_and_loses_nothing(cluster, tmp_path):
    for before, after, outcome in cluster("native", 2).run(
        functions.fail_to_write, tmp_path
    ):
        assert before == after
        assert "rank 1: OSError" in outcome
        assert "rank 0" not in outcome


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="rank 0: NotADirectoryError"):
        functions.train(tmp_path / "file" / "checkpoints")


def test_a_directory_that_ranks_do_not_share(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "listdir", lambda path: [])
    with pytest.raises(OSError, match="a folder that all machines share"):
        functions.train(tmp_path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with two checkpoints, by one process."""
    directory = tmp_path_factory.mktemp("checkpoints")
    functions.train(directory, epochs=2, every_steps=None)
    return directory


@pytest.fixture
def checkpoints(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoints")


def _truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def _flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [_truncate, _flip_a_bit, os.remove])
@pytest.mark.parametrize("file", ["dense.h5", "rank-00000.h5", "index.json"])
def test_damage_is_found_and_the_previous_one_offered(checkpoints, harm, file):
    last = checkpoints / "epoch-00002-step-0000000"
    harm(last / file)
    with pytest.raises(ValueError, match=file) as caught:
        functions.train(checkpoints)
    assert "go on from epoch-00001-step-0000000" in str(caught.value)
    shutil.move(last, checkpoints / "damaged")
    model = functions.build()
    path = ks.callbacks.ShardedCheckpoint(checkpoints).restore(model)
    assert os.path.basename(path) == "epoch-00001-step-0000000"


def test_a_kill_at_any_instant_leaves_a_complete_one(checkpoints, monkeypatch):
    """Every change to the file system may be the last one."""

    class Kill(BaseException):
        pass

    keras.utils.set_random_seed(5)
    model = functions.build()
    model.fit(*functions.arrays(), batch_size=8, verbose=0)
    alone = ks.collectives.current()
    calls = []

    def dying(stock):
        def call(*args, **kwargs):
            calls.append(stock.__name__)
            if len(calls) == deadline:
                raise Kill
            return stock(*args, **kwargs)

        return call

    names = folder.complete(checkpoints)
    for deadline in range(1, 40):
        calls.clear()
        with monkeypatch.context() as patch:
            for name in ("mkdir", "rename", "fsync", "unlink", "rmdir"):
                patch.setattr(os, name, dying(getattr(os, name)))
            position = {"epoch": 3, "step": deadline}
            try:
                storage.save(model, checkpoints, position, alone, keep=2)
            except Kill:
                pass
        path, index = storage.latest(checkpoints, alone)
        assert os.path.basename(path) in (
            names[-1],
            folder.name_of(3, deadline),
        )
        storage.restore(model, path, index, alone, ("model", "optimizer"))
        names = folder.complete(checkpoints)
        if len(calls) < deadline:
            break
    else:
        pytest.fail("it never came through")
    assert len(calls) > 8
    assert len(names) == 2
    assert not [name for name in os.listdir(checkpoints) if name[0] == "."]


def test_another_model_is_refused(checkpoints):
    with pytest.raises(ValueError, match="another model or optimizer") as error:
        functions.train(checkpoints, partitions=(1,))
    assert "the model has ('" in str(error.value)
    with pytest.raises(ValueError, match="another model or optimizer"):
        functions.train(checkpoints, optimizer="sgd")


class Spoil(keras.callbacks.Callback):
    """Gives the model's last bias a value before a step."""

    def __init__(self, step, value=np.nan, logs=None):
        super().__init__()
        self._step = step
        self._value = value
        self._logs = logs or {}

    def on_train_batch_begin(self, batch, logs=None):
        if self.model.optimizer.iterations == self._step:
            self.model.layers[-1].bias.assign([self._value] * 3)

    def on_train_batch_end(self, batch, logs=None):
        logs.update(self._logs)

    def on_epoch_end(self, epoch, logs=None):
        logs.update(self._logs)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, caplog, value):
    spoil = Spoil(20, value)
    functions.train(tmp_path, callbacks=[spoil])
    # The end of the second epoch, of 8 steps, and two more.
    assert folder.complete(tmp_path) == [
        folder.name_of(2, 0),
        folder.name_of(2, 3),
    ]
    (said,) = [r.message for r in caplog.records if "nothing" in r.message]
    assert "one to go on from: epoch-00002-step-0000003" in said
    model = functions.build()
    ks.callbacks.ShardedCheckpoint(tmp_path).restore(model)
    assert all(np.isfinite(w).all() for w in model.get_weights())


def test_finite_weights_are_saved_whatever_the_loss(tmp_path, caplog):
    """As of a step that mixed precision leaves out."""
    spoil = Spoil(-1, logs={"loss": np.float32("nan")})
    functions.train(tmp_path, epochs=1, callbacks=[spoil])
    assert folder.complete(tmp_path)[-1] == folder.name_of(1, 0)
    assert not [r for r in caplog.records if "nothing" in r.message]


def test_a_step_that_spoils_the_weights_is_not_saved(tmp_path):
    """Its own loss was finite: that of the weights before it."""

    class SpoilAfter(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.model.optimizer.iterations == 6:
                self.model.layers[-1].bias.assign([np.nan] * 3)

    functions.train(tmp_path, epochs=1, callbacks=[SpoilAfter()])
    assert folder.complete(tmp_path) == [folder.name_of(0, 3)]


def test_a_spoiled_part_of_a_table_is_not_saved(cluster, tmp_path):
    """The rows are rank 1's alone."""
    for saved, spoiled in cluster("native", 2).run(
        functions.save_spoiled, tmp_path
    ):
        assert saved == [folder.name_of(0, 1)]
        assert "embeddings" in spoiled


LOGS = {
    "float32": np.float32(0.1),
    "int64": np.int64(3),
    "bool": np.bool_(True),
    "scalar": np.array(0.5),
    "array": np.arange(3),
    "tensor": keras.ops.convert_to_tensor(2.5),
    "bfloat16": keras.ops.ones((), "bfloat16"),
    "text": np.str_("words"),
    "nested": {"list": [np.float64(1), (np.int8(2),)]},
    "none": None,
}


def test_logs_with_numbers_of_any_kind_are_saved(tmp_path):
    def kept():
        return functions.train(
            tmp_path, epochs=2, callbacks=[Spoil(-1, logs=LOGS)]
        )

    once, again = kept(), kept()
    assert len(once[3]["loss"]) == len(again[3]["loss"]) == 2
    for name, value in LOGS.items():
        expected = {
            "nested": {"list": [1.0, [2]]},
            "array": [0, 1, 2],
            "bfloat16": 1.0,
            "tensor": 2.5,
        }.get(name, value)
        assert again[3][name] == [expected] * 2, name


class Unspeakable:
    def __repr__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [object(), b"bytes", 1j, {3: 4}, Unspeakable(), lambda: 1, [[object()]]],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_is_named(tmp_path, value):
    with pytest.raises(ValueError, match="history.*'mine'.*Received") as error:
        functions.train(
            tmp_path, epochs=1, callbacks=[Spoil(-1, logs={"mine": value})]
        )
    assert "Leave it out" in str(error.value)


def test_an_error_on_one_rank_reaches_all_with_its_cause(cluster):
    others, failing = cluster("native", 2).run(functions.fail_on_rank_1)
    for kind, told, _ in others:
        assert f"Could not do it. rank 1: {kind}: " in told
        assert "rank 0" not in told
    assert [error for *_, error in others] == [
        *("RuntimeError", "ValueError", "OSError")
    ]
    # Where it is no error of writing, with the line that raised it.
    assert all("in fail\n" in told for _, told, _ in others[:2])
    assert failing == [
        ("ZeroDivisionError", "the cause", "ZeroDivisionError"),
        ("UnicodeError", "the cause", "UnicodeError"),
        (
            "PermissionError",
            "Could not do it. rank 1: PermissionError: the cause.",
            "OSError",
        ),
    ]


def test_only_in_a_scope_only_one_and_only_where_there_is_none(checkpoints):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    checkpoint = ks.callbacks.ShardedCheckpoint(checkpoints)
    data = np.ones((4, 1))
    with pytest.raises(ValueError, match=r"strategy\.scope\(\)"):
        model.fit(data, data, verbose=0, callbacks=[checkpoint])
    with ks.HybridStrategy(architecture="hybrid").scope():
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="one ShardedCheckpoint"):
        model.fit(data, data, callbacks=[checkpoint, checkpoint])
    anew = ks.callbacks.ShardedCheckpoint(checkpoints, resume=False)
    with pytest.raises(ValueError, match="resume=False would overwrite"):
        model.fit(data, data, callbacks=[anew])
    nothing = ks.callbacks.ShardedCheckpoint(checkpoints / "nothing")
    with pytest.raises(FileNotFoundError, match="No complete checkpoint"):
        nothing.restore(model)


# What other versions of this library have written.


@pytest.mark.smoke
def test_reads_the_first_format():
    """Written on two ranks by `python -m tests.checkpoint_functions`."""
    directory = str(
        pathlib.Path(__file__).parents[1] / "checkpoint" / "checkpoints-1"
    )
    with open(os.path.join(directory, "weights.json")) as file:
        expected = json.load(file)
    model = functions.build()
    path = ks.callbacks.ShardedCheckpoint(directory).restore(model)
    assert index.read(path)["format_version"] == 1
    found = [*model.get_weights(), *model.optimizer.state()]
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(np.float32(one), np.float32(other))


def test_a_later_format_is_refused(checkpoints):
    path = checkpoints / "epoch-00002-step-0000000" / "index.json"
    index = json.loads(path.read_text())
    index["format_version"] = 2
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="reads up to 1: update it"):
        functions.train(checkpoints)
