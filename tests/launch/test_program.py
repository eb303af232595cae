"""Programs on all ranks, started by the command line."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import types

import pytest

from keras_sparsity import launch
from tests import forked, server_functions
from tests.conftest import engines
from tests.launch_functions import is_running, ssh_client

_ROOT = str(pathlib.Path(__file__).parents[2])

# Every rank says who it is and does what the first argument says, with one
# word for each attempt.
_SCRIPT = """\
import ctypes, json, os, random, signal, sys, time
from keras_sparsity import collectives
from keras_sparsity.health import errors

ranks = collectives.current()
print(f"hello from rank {ranks.rank} of {ranks.size}, process {os.getpid()}",
      flush=True)
print("chance", collectives.agreed_seed(), random.random(), hash("a set's"),
      flush=True)
ranks.barrier("all have said it")  # before one's end ends the others
todo = sys.argv[1].split(",")[int(os.environ["KERAS_SPARSITY_RESTARTS"])]
if todo == "arguments":
    print(json.dumps([sys.argv, sys.path[0], __name__, __file__]), flush=True)
elif todo == "variables":
    print(json.dumps(dict(os.environ)), flush=True)
elif todo == "exit" and ranks.rank == 1:
    sys.exit(7)
elif todo == "exit first" and ranks.rank == 0:
    sys.exit(7)
elif todo == "raise" and ranks.rank == 1:
    raise ValueError("no luck")
elif todo == "raise last" and ranks.rank == ranks.size - 1:
    raise ValueError("no luck")
elif todo == "raise last":
    ranks.barrier("others wait")
elif todo == "raise alike":
    while ranks.rank and errors.failure() is None:
        time.sleep(0.01)  # rank 0 shows its own error
    raise ValueError("no luck\\n  anywhere")
elif todo == "kill" and ranks.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
elif todo == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ranks.barrier("all are deaf")
    print("deaf", flush=True)
    ctypes.PyDLL(None).sleep(600)  # with Python's lock
else:
    time.sleep(600)
"""


@pytest.fixture
def served_script(tmp_path):
    path = tmp_path / "served.py"
    path.write_text(server_functions.SCRIPT)
    return str(path)


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    return str(path)


def _command(*arguments):
    return [sys.executable, "-m", "keras_sparsity.launch", "run", *arguments]


def _variables(**more):
    paths = [_ROOT, os.environ.get("PYTHONPATH")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **more,
    }


@pytest.fixture
def run(capfd, monkeypatch):
    """`run(*arguments, **variables)` is the command, with its output.

    It runs in this process, which has imported TensorFlow already.
    """

    def run(*arguments, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        capfd.readouterr()
        code = launch.main(["run", *arguments])
        return types.SimpleNamespace(code=code, **capfd.readouterr()._asdict())

    return run


def _said(text, start="hello"):
    return [line for line in text.splitlines() if line.startswith(start)]


def test_a_script_gets_its_arguments(run, script, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    for stale in ("rank-1.log", "rank-3.restart-2.log", "mine.log"):
        (logs / stale).write_text("of an earlier run")
    words = ["arguments", "-n", "3", "--", "--engine=x", "a b"]
    done = run(
        *("-n", "2", "--log-dir", str(logs), script, *words),
        KERAS_SPARSITY_SEED="1234",
    )
    assert done.code == 0, done.err
    assert len(_said(done.out)) == 1
    assert "rank 0 of 2" in done.out
    assert json.loads(_said(done.out, "[")[0]) == [
        [script, *words],
        str(tmp_path),
        "__main__",
        script,
    ]
    assert _said(done.out, "chance 1234 ")
    assert sorted(os.listdir(logs)) == ["mine.log", "rank-1.log"]
    log = (logs / "rank-1.log").read_text()
    assert "rank 1 of 2" in log
    assert _said(log, "chance") == _said(done.out, "chance")
    assert "sent each other nothing" not in done.err


# Processes of `spawn` import the script, and are no ranks.
_PARENT = """\
import multiprocessing, os, tempfile
import keras_sparsity as ks

strategy = ks.HybridStrategy()

def number_of_ranks(_):
    return ks.HybridStrategy(engine="native").size

if __name__ == "__main__":
    os.chdir(tempfile.gettempdir())
    print("hello", os.path.exists(__file__))
    if strategy.rank == 0:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print("hello", strategy.size, pool.map(number_of_ranks, "a"))
"""


def test_a_script_that_leaves_its_folder_and_has_children(
    run, tmp_path, monkeypatch
):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "parent.py").write_text(_PARENT)
    monkeypatch.chdir(tmp_path)
    done = run("-n", "2", "--timeout", "60", "folder/parent.py")
    assert done.code == 0, done.err
    assert _said(done.out) == ["hello True", "hello 2 [1]"]


def test_a_program_without_a_strategy(run, tmp_path):
    path = tmp_path / "plain.py"
    path.write_text(
        "import keras, sys\nprint(keras.ops.ones(()) + 1)\nsys.exit(0)"
    )
    done = run("-n", "1", "--servers", "1", str(path))
    assert done.code == 0, done.err
    assert done.err.count("its 2 processes have sent each other nothing") == 1


# Its ranks start anew in `test_tutorials.py`, too.
@pytest.mark.parametrize(
    "is_killed", [False, pytest.param(True, marks=pytest.mark.all_cells)]
)
def test_horovod_and_a_module(run, script, tmp_path, is_killed):
    pytest.importorskip("horovod")
    todo = "kill,arguments" if is_killed else "arguments"
    done = run(
        *("-n", "2", "--engine", "horovod", "--max-restarts", "1"),
        *("-m", "script", todo),
        PYTHONPATH=str(tmp_path),
    )
    assert done.code == 0, done.err
    assert ("rank 1 of 2 was killed by SIGKILL" in done.err) == is_killed
    assert ("; restart 1 of 1.\n" in done.err) == is_killed
    assert len(_said(done.out)) == 1 + is_killed
    assert len(set(_said(done.out, "chance"))) == 1
    arguments = json.loads(_said(done.out, "[")[0])[0]
    assert arguments == [script, todo]


def test_a_failing_rank_ends_the_others_and_all_start_anew(
    run, script, tmp_path
):
    logs = tmp_path / "logs"
    with forked.ranks():
        done = run(
            *("-n", "2", "--max-restarts", "2", "--log-dir", str(logs)),
            *(script, "kill,exit,raise"),
        )
    assert done.code == 1, done.err
    first, second = _said(done.err, "keras-sparsity: ")[:2]
    assert "rank 1 of 2 was killed by SIGKILL" in first
    assert first.endswith(f"{logs}/rank-1.log); restart 1 of 2.")
    assert "rank 1 of 2 exited with code 7" in second
    assert second.endswith("rank-1.restart-1.log); restart 2 of 2.")
    # The last time it is shown as without restarts, from its file.
    assert "keras-sparsity: rank 1 of 2 exited with code 1." in done.err
    assert done.err.count("  | hello from rank 1") == 1
    assert "  | ValueError: no luck" in done.err
    assert "_child.py" not in done.err
    names = ["rank-1.log", "rank-1.restart-1.log", "rank-1.restart-2.log"]
    assert sorted(os.listdir(logs)) == names
    # Each attempt draws as the first one did.
    chances = _said(done.out, "chance")
    for name in names:
        chances += _said((logs / name).read_text(), "chance")
    assert len(chances) == 6
    assert len(set(chances)) == 1


def test_the_rank_whose_error_ends_the_others_is_named_first(run, script):
    with forked.ranks():
        done = run(
            *("-n", "3", "--max-restarts", "1", script),
            "raise last,raise last",
        )
    assert done.code == 1, done.err
    again, cause, *others = _said(done.err, "keras-sparsity: ")[:4]
    assert again.startswith("keras-sparsity: rank 2 of 3 exited with code 1 (")
    assert cause == "keras-sparsity: rank 2 of 3 exited with code 1."
    assert sorted(others) == [
        f"keras-sparsity: after it, rank {rank} of 3 exited with code 1."
        for rank in (0, 1)
    ]


def test_an_error_of_all_ranks_is_shown_once(run, script):
    with forked.ranks():
        done = run("-n", "2", script, "raise alike")
    assert done.code == 1, done.err
    assert done.err.count("Traceback") == 1, done.err
    assert done.err.count("ValueError: no luck\n  anywhere\n") == 1
    assert "the same error on rank 1; output: " in done.err


@pytest.mark.parametrize("num_processes", [1, 2])
def test_output_after_a_failure_of_rank_0_alone(
    num_processes, run, script, tmp_path, monkeypatch
):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with forked.ranks():
        done = run("-n", str(num_processes), script, "exit first")
    assert done.code == 7, done.err
    folders = list(temporary.glob("keras-sparsity-*"))
    assert len(folders) == num_processes - 1
    for folder in folders:
        assert f"the other ranks' output: {folder}\n" in done.err
        assert "hello from rank 1" in (folder / "rank-1.log").read_text()
    assert ("output" in done.err) == bool(folders)


def test_a_script_that_takes_too_long(run, script):
    done = run(
        *("-n", "1", "--timeout", "0.5", "--max-restarts", "2", script, "wait")
    )
    assert done.code == 124
    assert "not done within 0.5 seconds" in done.err
    assert "restart" not in done.err


@contextlib.contextmanager
def _running(*arguments):
    """A launcher whose rank 0 has said hello; also yields the ranks' pids."""
    with subprocess.Popen(
        _command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_variables(),
    ) as launcher:
        try:
            assert launcher.stdout.readline().startswith("hello from rank 0")
            children = f"/proc/{launcher.pid}/task/{launcher.pid}/children"
            with open(children) as file:
                pids = [int(pid) for pid in file.read().split()]
            yield launcher, pids
        finally:
            launcher.kill()


def _wait_for_end(pids, seconds):
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(is_running, pids))


@pytest.mark.parametrize(
    ("signal_number", "exit_code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143)],
)
def test_signals_go_to_the_ranks(signal_number, exit_code, script):
    options = ("-n", "2", "--max-restarts", "2")
    with _running(*options, script, "wait") as (launcher, pids):
        assert len(pids) == 2
        launcher.send_signal(signal_number)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == exit_code
    assert "; restart" not in errors
    assert ("KeyboardInterrupt" in errors) == (signal_number == signal.SIGINT)
    assert _wait_for_end(pids, 1)


def test_ranks_do_not_outlive_the_launcher(script):
    with _running("-n", "2", script, "deaf") as (launcher, pids):
        assert len(pids) == 2
        assert "deaf\n" in launcher.stdout
        launcher.kill()
        # Within 4 s, but a busy machine takes longer; alone they run for 600 s.
        assert _wait_for_end(pids, 40)


# Other machines


@pytest.fixture
def ssh(tmp_path):
    return ssh_client(tmp_path)


# A rank that fails behind ssh is told in `test_remote.py`, too.
@pytest.mark.parametrize(
    "fails", [False, pytest.param(True, marks=pytest.mark.all_cells)]
)
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_two_hosts_over_ssh(engine, run, ssh, script, tmp_path, fails):
    # Two names of this machine that are not taken for it.
    hostfile = tmp_path / "hosts"
    hostfile.write_text("127.0.0.2: 5,\n127.0.0.3: 6,7\n")
    logs = tmp_path / "logs"
    restarts = int(fails)
    done = run(
        *("--hostfile", str(hostfile), "--ssh", ssh, "--engine", engine),
        *("--env", "MINE", "--env", "YOURS=a b'c", "--log-dir", str(logs)),
        *("--rank-timeout", "50", "--max-restarts", str(restarts)),
        *(script, "exit,variables" if restarts else "variables"),
        MINE="given",
        NOT_MINE="kept",
        TF_CPP_VMODULE="none=0",
        HOROVOD_GLOO_IFACE="lo",
    )
    assert done.code == 0, done.err
    failure = "rank 1 of 3 exited with code 7 on 127.0.0.3"
    assert (failure in done.err) == bool(restarts)
    outputs = [done.out]
    ending = ".restart-1.log" if restarts else ".log"
    outputs += [(logs / f"rank-{rank}{ending}").read_text() for rank in (1, 2)]
    for rank, output in enumerate(outputs):
        assert f"rank {rank} of 3" in output
        variables = json.loads(_said(output, "{")[0])
        assert variables["CUDA_VISIBLE_DEVICES"] == ("5", "6,7", "6,7")[rank]
        assert variables["MINE"] == "given"
        assert variables["YOURS"] == "a b'c"
        assert variables["TF_CPP_VMODULE"] == "none=0"
        assert variables["KERAS_SPARSITY_TIMEOUT"] == "50"
        assert variables["KERAS_SPARSITY_RESTARTS"] == str(restarts)
        assert "NOT_MINE" not in variables


# Hosts have servers in `test_hosts.py`, and workers above.
@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
def test_servers_of_hosts_over_ssh(engine, run, ssh, served_script, tmp_path):
    logs = tmp_path / "logs"
    done = run(
        *("--hosts", "127.0.0.2:1+1,127.0.0.3:1", "--ssh", ssh),
        *("--engine", engine, "--log-dir", str(logs), served_script),
    )
    assert done.code == 0, done.err
    outputs = [done.out]
    outputs += [(logs / f"rank-{rank}.log").read_text() for rank in (1, 2)]
    for rank, output in enumerate(outputs):
        told = ("worker 0 0", "worker 1 0", "ps 0 9")[rank]
        assert f"RANK {rank} 2 {told}\n" in output


def test_every_host_that_cannot_take_part_is_named(run, ssh, script):
    done = run(
        *("--hosts", "localhost:1,down:2,old:1,127.0.0.3:1"),
        *("--python", "/missing/python", script, "wait"),
        KERAS_SPARSITY_SSH=ssh,
    )
    assert done.code == 1
    assert "hello" not in done.out
    for problem in (
        "down: not reachable by ssh: ssh: connect to host down: Connection",
        "127.0.0.3: no Python at /missing/python",
        "old: has python 3.9.1, the first host has",
        f"has no {script}",
    ):
        assert problem in done.err
