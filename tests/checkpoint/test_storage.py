"""Checkpoints from someone else, and two trainings in one folder."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import types

import h5py
import keras
import numpy as np
import pytest

import keras_sparsity as ks
from keras_sparsity.checkpoint import folder, index, lock, storage
from keras_sparsity.checkpoint.state import Entry
from tests import checkpoint_functions as functions

LAST = "epoch-00001-step-0000000"


@pytest.fixture(scope="module")
def saved():
    """A checkpoint of two processes, and the model that it is of."""
    data = os.path.join(os.path.dirname(__file__), "checkpoints-1")
    return data, functions.build()


@pytest.fixture
def checkpoints(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("ranks", "differing", "writers"),
    [
        ((1, 2), set(), [1]),
        ((1, 2), {0}, [1, 2]),
        (None, set(), ["all"]),
        (None, {0}, [0, 1, 2]),
    ],
)
def test_equal_values_are_written_once(tmp_path, ranks, differing, writers):
    """Those that some ranks have by the first of them, others' together."""
    found = []
    for rank in range(3):
        is_here = ranks is None or rank in ranks
        variables = [keras.Variable(7.0)] if is_here else []
        entry = Entry("model", "it", (), "float32", variables, ranks=ranks)
        communicator = types.SimpleNamespace(rank=rank, size=3)
        storage._write_files(tmp_path, [entry], differing, communicator)
        (record,) = storage._records([entry], differing, communicator)
        assert record.get("each_rank", False) == bool(differing)
        assert record.get("ranks") == (ranks and writers)
        with h5py.File(tmp_path / folder.rank_file(rank)) as file:
            found += [rank] * ("0" in file)
    with h5py.File(tmp_path / folder.DENSE) as file:
        found += ["all"] * ("0" in file)
    assert found == writers


def digest(data):
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def forge(checkpoints, change):
    """Changes the index; its checksums, and those of the files, fit."""
    path = checkpoints / LAST
    forged = json.loads((path / "index.json").read_text())
    del forged["checksum"]
    for name, facts in forged["files"].items():
        data = (path / name).read_bytes()
        facts.update(bytes=len(data), checksum=digest(data))
    change(forged)
    forged["checksum"] = digest(json.dumps(forged, sort_keys=True).encode())
    (path / "index.json").write_text(json.dumps(forged))


def latest(checkpoints):
    return storage.latest(checkpoints, ks.collectives.current(), True)


def to(*keys_and_value):
    """A change of the index: sets, or takes away, what keys lead to."""
    *keys, last, value = keys_and_value

    def change(forged):
        for key in keys:
            forged = forged[key]
        if value is KeyError:
            del forged[last]
        else:
            forged[last] = value

    change.__name__ = f"{'.'.join(map(str, [*keys, last]))}={str(value)[:20]}"
    return change


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


CHANGES = [
    *(
        to(*keys, wrong)
        for keys, all_wrong in [
            (["format"], (KeyError, None, "other", 3, ["x"])),
            (["format_version"], (KeyError, None, "1", 1.0, True, 0, [1])),
            (["num_processes"], (KeyError, None, 0, -1, 3, 10**30, "1", True)),
            (["position"], (KeyError, None, [], 3)),
            (["position", "epoch"], (KeyError, None, -1, "1", 1.5, True)),
            (["position", "step"], (KeyError, None, -1, 10**400)),
            (["position", "has_begun"], (None, 0)),
            (["position", "has_stopped"], (KeyError, None, 0)),
            (["position", "seed"], (KeyError, "5", 1.5)),
            (["position", "order_seed"], (KeyError, "5", -1)),
            (
                ["position", "history"],
                (KeyError, None, {}, [[], []], [["a"], {}], [[0], {"a": 3}]),
            ),
            (
                ["position", "callbacks"],
                (KeyError, None, {}, [3], [["A"]], [["A", "b"]], [[3, {}]]),
            ),
            (["files"], (KeyError, None, [], {}, {"dense.h5": 3})),
            (["files", "dense.h5"], (KeyError, None, [])),
            (["files", "dense.h5", "bytes"], (KeyError,)),
            (["files", "../dense.h5"], ({"bytes": 1, "checksum": ""},)),
            (["files", "/etc/passwd"], ({"bytes": 1, "checksum": ""},)),
            (["variables"], (KeyError, None, {}, 3, [3], [None])),
            (["variables", 0, "section"], (KeyError, None, "others", [1])),
            (["variables", 0, "name"], (KeyError, None, 3)),
            (["variables", 0, "dtype"], (KeyError, None, 3)),
            (["variables", 0, "shape"], (KeyError, None, 3, [-1], ["a"])),
            (["variables", 0, "shape"], ([1.5], [10**30], [])),
            (["variables", 0, "num_partitions"], (None, 0, -1, "2", 1.5)),
            (["variables", 0, "owners"], (KeyError, None, [], [2], [-1], 0)),
            (["variables", 0, "owners"], (["../.."], ["0"], [0.0])),
            (["variables", 3, "each_rank"], (None, 1, "yes")),
            (["variables", 3, "ranks"], (None, 0, [], [2], [-1], ["../.."])),
        ]
        for wrong in all_wrong
    ),
    to("more", nested(40)),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_an_index_that_is_wrong_is_explained(checkpoints, change):
    forge(checkpoints, lambda forged: None)
    assert latest(checkpoints)[1]["num_processes"] == 2
    forge(checkpoints, change)
    with pytest.raises(ValueError, match=r"index\.json .*") as error:
        latest(checkpoints)
    told = str(error.value)
    assert "Move it out of its folder to start anew" in told
    assert type(error.value) is ValueError and len(told) < 1000


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "3", "null", '"text"', "{", "\ud800", "[" * 100_000),
        '{"format": ' * 100_000,
        "[" * 900 + "]" * 900,
        '{"checksum": 1, "format": 2, "format_version": null}',
    ],
    ids=lambda text: text[:20] or "nothing",
)
def test_an_index_that_is_none_is_explained(checkpoints, text):
    path = checkpoints / LAST / "index.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ValueError, match=r"the index .*index\.json"):
        latest(checkpoints)


@pytest.mark.parametrize("file", ["index.json", "dense.h5", "rank-00000.h5"])
@pytest.mark.parametrize("kind", ["link", "fifo", "folder"])
def test_only_files_of_the_folder_are_read(checkpoints, tmp_path, file, kind):
    path = checkpoints / LAST / file
    other = shutil.move(path, tmp_path / "other")
    if kind == "link":
        path.symlink_to(other)
    elif kind == "fifo":  # reading it would wait for ever
        os.mkfifo(path)
    else:
        path.mkdir()
    with pytest.raises(ValueError, match=f"{file} (is|cannot be read)"):
        latest(checkpoints)


def test_a_huge_index_is_not_read(checkpoints, monkeypatch):
    monkeypatch.setattr(index, "_MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        latest(checkpoints)


# HDF5.

SHAPE = (6, 3)  # of the last Dense layer's kernel


def kernel_number(checkpoints):
    """Its number among the variables of the index."""
    path = checkpoints / LAST / "index.json"
    records = json.loads(path.read_text())["variables"]
    (number,) = [
        str(n)
        for n, record in enumerate(records)
        if record["section"] == "model"
        and record["shape"] == list(SHAPE)
        and "dense" in record["name"]
    ]
    return number


def secret_file(tmp_path):
    """A file of the user's, which is also what an HDF5 file has."""
    path = tmp_path / "secret"
    path.write_bytes(b"\x42\x42\x42\x42" * 18)
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["0"] = np.full(SHAPE, 48.5, "float32")
    return path


def external(file, name, tmp_path):
    file.create_dataset(
        name, SHAPE, "f4", external=[(str(secret_file(tmp_path)), 0, 72)]
    )


def external_link(file, name, tmp_path):
    secret_file(tmp_path)
    file[name] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "/0")


def soft_link(file, name, tmp_path):
    file["other"] = np.zeros(SHAPE, "f4")
    file[name] = h5py.SoftLink("/other")


def dangling(file, name, tmp_path):
    file[name] = h5py.SoftLink("/nowhere")


def virtual(file, name, tmp_path):
    secret_file(tmp_path)
    layout = h5py.VirtualLayout(SHAPE, "f4")
    layout[:] = h5py.VirtualSource(tmp_path / "secret.h5", "0", SHAPE)
    file.create_virtual_dataset(name, layout)


def bomb(file, name, tmp_path):
    file.create_dataset(name, (3_000_000, 3_000_000), "f4")  # 36 TB


def unwritten(file, name, tmp_path):
    file.create_dataset(name, SHAPE, "f4")


def packed(file, name, tmp_path):
    file.create_dataset(name, SHAPE, "f4", compression="gzip")


def chunked(file, name, tmp_path):
    file.create_dataset(name, data=np.zeros(SHAPE, "f4"), chunks=(2, 3))


def other_shape(file, name, tmp_path):
    file[name] = np.zeros((6, 4), "f4")


def other_rank(file, name, tmp_path):
    file[name] = np.zeros(18, "f4")


def other_dtype(file, name, tmp_path):
    file[name] = np.zeros(SHAPE, "f8")


def big_endian(file, name, tmp_path):
    file[name] = np.zeros(SHAPE, ">f4")


def texts(file, name, tmp_path):
    file.create_dataset(name, SHAPE, h5py.string_dtype())


def references(file, name, tmp_path):
    file.create_dataset(name, SHAPE, h5py.ref_dtype)


def a_group(file, name, tmp_path):
    file.create_group(name)


def a_type(file, name, tmp_path):
    file[name] = np.dtype("f4")


def nothing(file, name, tmp_path):
    pass


HARMS = {
    external: "stored in other files",
    external_link: "is a link",
    soft_link: "is a link",
    dangling: "is a link",
    virtual: "not stored in one piece",
    bomb: r"has shape \(3000000, 3000000\) in place of \(6, 3\)",
    unwritten: "has not 72 bytes in the file",
    packed: "not stored in one piece",
    chunked: "not stored in one piece",
    other_shape: r"has shape \(6, 4\) in place of \(6, 3\)",
    other_rank: r"has shape \(18,\) in place of \(6, 3\)",
    other_dtype: "is of float64 in place of float32",
    big_endian: "is of >f4 in place of float32",
    texts: "is of object in place of float32",
    references: "is of object in place of float32",
    a_group: "is not a dataset",
    a_type: "is not a dataset",
    nothing: "is missing",
}


@pytest.mark.parametrize(
    ("harm", "message"), HARMS.items(), ids=lambda v: getattr(v, "__name__", "")
)
def test_only_what_is_expected_is_read(
    saved, checkpoints, tmp_path, harm, message
):
    number = kernel_number(checkpoints)
    with h5py.File(checkpoints / LAST / "dense.h5", "a") as file:
        del file[number]
        harm(file, number, tmp_path)
    forge(checkpoints, lambda forged: None)
    model = saved[1]
    before = model.layers[-1].kernel.numpy()
    with pytest.raises(ValueError, match=message) as error:
        ks.callbacks.ShardedCheckpoint(checkpoints).restore(model)
    assert "dense.h5" in str(error.value)
    np.testing.assert_array_equal(model.layers[-1].kernel, before)


@pytest.mark.parametrize("harm", [soft_link, bomb, a_group, nothing, packed])
@pytest.mark.parametrize("inside", [True, False])
def test_rows_of_tables_likewise(saved, checkpoints, tmp_path, harm, inside):
    with h5py.File(checkpoints / LAST / "rank-00000.h5", "a") as file:
        place = file["0"] if inside else file
        del place["0"]
        harm(place, "0", tmp_path)
    forge(checkpoints, lambda forged: None)
    with pytest.raises(ValueError, match="rank-00000.h5"):
        ks.callbacks.ShardedCheckpoint(checkpoints).restore(saved[1])


def test_a_file_that_is_not_hdf5(saved, checkpoints):
    for data in (b"", b"text", b"\x89HDF\r\n\x1a\n" + bytes(500)):
        (checkpoints / LAST / "dense.h5").write_bytes(data)
        forge(checkpoints, lambda forged: None)
        with pytest.raises(ValueError, match="dense.h5 cannot be read"):
            ks.callbacks.ShardedCheckpoint(checkpoints).restore(saved[1])


def test_sizes_are_compared_with_the_model_first(saved, checkpoints):
    """Index and file agree on 36 TB, which the model has not."""
    number = int(kernel_number(checkpoints))
    with h5py.File(checkpoints / LAST / "dense.h5", "a") as file:
        del file[str(number)]
        bomb(file, str(number), None)
    forge(checkpoints, to("variables", number, "shape", [3_000_000] * 2))
    with pytest.raises(ValueError, match="another model or optimizer"):
        ks.callbacks.ShardedCheckpoint(checkpoints).restore(saved[1])
    forge(checkpoints, to("variables", number, "each_rank", True))
    with pytest.raises(ValueError, match="rank-00000.h5 is missing"):
        ks.callbacks.ShardedCheckpoint(checkpoints).restore(saved[1])


def random_text(position=0, kind="MT19937", python=(3, [0] * 625, None)):
    return json.dumps([python, [kind, [1] * 624, position, 0, 0.0]])


@pytest.mark.parametrize(
    "states",
    [
        *("", "null", "[" * 5000, "[1, 2]", 3, np.zeros(3), KeyError),
        # NumPy would read what lies there in its process's memory.
        random_text(position=10**6),
        random_text(position=-1),
        random_text(position="0"),
        random_text(kind="PCG64"),
        random_text(python=(3, [0] * 10, None)),
        random_text(python=(3, [0] * 624 + [10**6], None)),
    ],
    ids=lambda states: str(states)[:30].strip("[]"),
)
def test_random_states_that_are_none(checkpoints, states):
    path = checkpoints / LAST / "rank-00000.h5"
    with h5py.File(path, "a") as file:
        del file.attrs["host_random_states"]
        if states is not KeyError:
            file.attrs["host_random_states"] = states
    communicator = ks.collectives.current()
    forge(checkpoints, lambda forged: None)
    with pytest.raises(ValueError, match="random.states"):
        storage.read_host_states(*latest(checkpoints), communicator)


# Callbacks.


@pytest.mark.parametrize(
    ("kind", "learnt"),
    [
        ("ModelCheckpoint", {"filepath": "/tmp/chosen.keras"}),
        ("CSVLogger", {"filename": "/tmp/chosen.csv"}),
        ("TensorBoard", {"log_dir": "/tmp/chosen"}),
        ("Mine", {"path": "/tmp/chosen"}),
        ("ReduceLROnPlateau", {"model": None}),
        ("ReduceLROnPlateau", {"patience": 3}),
        ("ReduceLROnPlateau", {"wait": "3"}),
        ("ReduceLROnPlateau", {"best": [1.0]}),
        ("EarlyStopping", {"__class__": 3}),
        ("EarlyStopping", {"restore_best_weights": True}),
    ],
)
def test_callbacks_get_what_they_learnt_alone(saved, checkpoints, kind, learnt):
    forge(checkpoints, to("position", "callbacks", [[kind, learnt]]))
    name = next(iter(learnt))

    class Mine(keras.callbacks.Callback):
        path = "own"

    # Whether there is such a callback or not.
    with pytest.raises(ValueError, match=rf"would set {kind}\.{name} to"):
        saved[1].fit(
            *functions.arrays(),
            epochs=2,
            verbose=0,
            callbacks=[Mine(), ks.callbacks.ShardedCheckpoint(checkpoints)],
        )


# Two trainings in one folder.

_TRY = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
"""


def is_held(path):
    command = [sys.executable, "-S", "-c", _TRY, path]
    return subprocess.run(command, stderr=subprocess.DEVNULL).returncode != 0


_TRAIN = """
import os, sys, time
import keras
from tests import checkpoint_functions as functions

class Wait(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == 12:
            if not os.fork():  # as a worker that loads data
                time.sleep(600)
                os._exit(0)
            print("waiting", flush=True)
            time.sleep(600)

functions.train(sys.argv[1], callbacks=[Wait()])
"""


def test_a_second_training_is_refused_until_the_first_has_ended(
    cluster, tmp_path
):
    first = subprocess.Popen(
        [sys.executable, "-c", _TRAIN, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert first.stdout.readline() == "waiting\n"
        names = folder.complete(tmp_path)
        for told, seconds in cluster("native", 2).run(
            functions.try_to_train, tmp_path
        ):
            assert f"Could not use the directory {tmp_path}" in told
            assert f"process {first.pid} on " in told
            assert "use a directory for each training" in told
            assert seconds < 60
        assert folder.complete(tmp_path) == names
        first.kill()  # its child is left, and has no lock
        first.wait()
        undisturbed = functions.train()
        resumed = functions.train(tmp_path)
    finally:
        os.killpg(first.pid, 9)
        first.stdout.close()
        first.wait()
    np.testing.assert_array_equal(undisturbed[0][0], resumed[0][0])
    assert not (tmp_path / ".lock").exists()


def test_the_lock_ends_with_fit_however_it_ends(tmp_path):
    held = []

    class Look(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            held.append(is_held(tmp_path / ".lock"))

    # By an exception.
    assert not functions.train(tmp_path, interrupt_after=4, callbacks=[Look()])
    assert held == [True]
    assert os.listdir(tmp_path) == [folder.name_of(0, 3)]


def test_a_second_fit_of_the_same_process_is_refused(tmp_path):
    with lock.locked(tmp_path):
        with pytest.raises(OSError, match="another `fit` of this process"):
            with lock.locked(tmp_path):
                pass
        assert is_held(tmp_path / ".lock")
    with lock.locked(tmp_path):
        pass
    assert not os.listdir(tmp_path)


def test_a_lock_that_was_left_and_one_that_is_none(tmp_path):
    path = tmp_path / ".lock"
    path.write_text("process 1 on another machine" * 9)  # killed
    with lock.locked(tmp_path):
        assert f"process {os.getpid()} on " in path.read_text()
        assert "another machine" not in path.read_text()
    precious = tmp_path / "precious"
    precious.write_text("mine")
    path.symlink_to(precious)
    (tmp_path / ".probe-0").symlink_to(precious)
    with pytest.raises(OSError, match="is a symbolic link"):
        functions.train(tmp_path)
    path.unlink()
    functions.train(tmp_path, epochs=1)
    assert precious.read_text() == "mine"


_HOLD = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_training_that_is_just_ending_is_waited_for(tmp_path, monkeypatch):
    command = [sys.executable, "-S", "-c", _HOLD, tmp_path / ".lock"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == b"held\n"
        monkeypatch.setattr(lock.time, "sleep", lambda _: other.communicate())
        with lock.locked(tmp_path):
            assert other.returncode == 0


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with lock.locked(tmp_path):
        pass
    assert "would not be noticed" in caplog.text
    monkeypatch.setattr(fcntl, "lockf", lambda *_: os.fstat(-1))
    with pytest.raises(OSError, match="Bad file descriptor"):
        with lock.locked(tmp_path):
            pass
