"""Starting, watching and ending processes, without TensorFlow in them."""

import os
import signal
import sys
import time
import types

import pytest

from keras_sparsity.launch import processes
from keras_sparsity.launch.processes import ProcessGroup
from keras_sparsity.launch.program import _Watched
from keras_sparsity.launch.rank_process import RankProcess
from tests.launch_functions import is_running

_SLEEP = "import time; time.sleep(60)"
_IGNORE_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('ready', flush=True); time.sleep(60)"
)


def _start(group, programs, folder):
    for rank, program in enumerate(programs):
        path = str(folder / f"{rank}.log")
        group.append(
            RankProcess(
                rank,
                [sys.executable, "-c", program],
                dict(os.environ),
                stdout=path,
                stderr=path,
            )
        )


def _after_words_of(rank, folder, program):
    """The program, begun once another rank has printed something."""
    path = str(folder / f"{rank}.log")
    return (
        "import os, time\n"
        f"path = {path!r}\n"
        "while not (os.path.exists(path) and os.path.getsize(path)):\n"
        "    time.sleep(0.01)\n"
        f"{program}"
    )


def _is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr(processes, "LAST_WORDS_SECONDS", 0.3)
    monkeypatch.setattr(processes, "LOST_SECONDS", 0.3)
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)


def test_success(tmp_path):
    with ProcessGroup() as group:
        _start(group, ["print(1)", "print(2)"], tmp_path)
        group.wait()
        assert group.failed() == []
        assert [p.exit_code for p in group.processes] == [0, 0]
        assert group.processes[1].last_lines() == ["2"]


@pytest.mark.parametrize(
    ("program", "exit_code", "description"),
    [
        ("import sys; sys.exit(7)", 7, "exited with code 7"),
        ("raise ValueError", 1, "exited with code 1"),
        (
            "import os; os.kill(os.getpid(), 9)",
            137,
            "was killed by SIGKILL (by the system, if memory ran out",
        ),
        ("import os; os.kill(os.getpid(), 11)", 139, "was killed by SIGSEGV"),
    ],
)
def test_a_failure_ends_the_others(
    program, exit_code, description, tmp_path, short_waits
):
    start = time.monotonic()
    with ProcessGroup() as group:
        _start(group, [_SLEEP, program, _SLEEP], tmp_path)
        group.wait()
        failed = group.failed()
    assert time.monotonic() - start < 50  # they would sleep for 60 s
    assert [p.rank for p in failed] == [1]
    assert failed[0].exit_code == exit_code
    assert failed[0].describe_end().startswith(description)
    assert group.processes[0].describe_end() == "was ended by the launcher"


def test_who_does_not_hear_sigterm_is_killed(tmp_path, short_waits):
    failing = _after_words_of(0, tmp_path, "raise SystemExit(3)")
    with ProcessGroup() as group:
        _start(group, [_IGNORE_SIGTERM, failing], tmp_path)
        group.wait()
        assert group.processes[0].returncode == -signal.SIGKILL
        assert [p.rank for p in group.failed()] == [1]


def test_the_cause_is_named_first(tmp_path):
    consequence = _after_words_of(
        1, tmp_path, "raise RuntimeError('rank 1 is gone')"
    )
    cause = (
        "import os, time; print('ready', flush=True); time.sleep(.5); "
        "os.kill(os.getpid(), 9)"
    )
    with ProcessGroup() as group:
        _start(group, [consequence, cause], tmp_path)
        group.wait()
        assert [p.rank for p in group.failed()] == [1, 0]


def test_ranks_that_abort_together_are_not_the_cause(tmp_path):
    """As those that Horovod aborts when another one's connections end."""
    aborted = _after_words_of(2, tmp_path, "os.abort()")
    cause = (
        "import time; print('ready', flush=True); time.sleep(.5); "
        "raise RuntimeError('a callback')"
    )
    with ProcessGroup() as group:
        _start(group, [aborted, aborted, cause], tmp_path)
        group.wait()
        assert group.failed()[0].rank == 2


def test_leaving_the_block_ends_all(tmp_path):
    with ProcessGroup() as group:
        _start(group, [_SLEEP, _IGNORE_SIGTERM], tmp_path)
        pids = [p.pid for p in group.processes]
        assert all(map(_is_alive, pids))
    assert not any(map(_is_alive, pids))


def test_lost_ranks_start_anew_while_others_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    lost, told = set(), []

    def on_lost(process, goes_on):
        told.append((process.rank, goes_on))
        if len(told) > 1:
            return None
        command = [sys.executable, "-c", _SLEEP]
        return RankProcess(1, command, dict(os.environ))

    def until(condition):
        while not condition():
            yield

    def polls(group):
        os.kill(group.processes[1].pid, signal.SIGKILL)
        lost.add(1)
        yield from until(lambda: told == [(1, True)])
        # Its new process dies with another rank: others may not go on.
        for rank in (2, 1):
            process = group.processes[rank]
            os.kill(process.pid, signal.SIGKILL)
            yield from until(lambda p=process: p.returncode is not None)
            yield
        yield
        assert told == [(1, True)]
        lost.add(2)
        yield from until(lambda: len(told) == 3)
        assert told[1:] == [(2, True), (1, True)]
        yield from until(group.processes[0].last_lines)
        lost.add(3)
        group.stop()
        yield from until(lambda: False)

    with ProcessGroup(lost, on_lost) as group:
        _start(group, [_IGNORE_SIGTERM, _SLEEP, _SLEEP, _SLEEP], tmp_path)
        group.wait(polls(group).__next__)
    assert told[3:] == [(3, False)]


@pytest.mark.parametrize("is_needed", [False, True])
def test_a_needed_rank_without_a_new_process_fails(
    is_needed, tmp_path, short_waits
):
    told = []

    def on_lost(process, goes_on):
        told.append(process.rank)

    is_of = {1: is_needed}.get
    with ProcessGroup({1}, on_lost, is_of) as group:
        programs = [_SLEEP if is_needed else "", "import sys; sys.exit(3)"]
        _start(group, programs, tmp_path)
        group.wait()
        assert told == [1]
        assert group.succeeded() is not is_needed
        assert [p.rank for p in group.failed()] == [1] * is_needed


def test_a_rank_that_is_lost_too_late_is_the_cause(tmp_path, short_waits):
    lost = set()

    def poll():
        if group.processes[0].we_ended_it:
            lost.add(1)

    with ProcessGroup(lost) as group:
        _start(group, [_SLEEP, "import sys; sys.exit(3)"], tmp_path)
        group.wait(poll)
        assert group.failed() == [] and not group.succeeded()
        watched = _Watched(group, types.SimpleNamespace(received=[]), None, 0)
        assert watched.exit_code() == 3
        assert watched.describe_cause().startswith("rank 1 of 2 exited")


def test_what_a_rank_started_ends_with_it(tmp_path):
    program = (
        "import subprocess, sys; "
        f"p = subprocess.Popen([sys.executable, '-c', {_SLEEP!r}]); "
        "print(p.pid, flush=True); sys.exit(1)"
    )
    with ProcessGroup() as group:
        _start(group, [program], tmp_path)
        group.wait()
        pid = int(group.processes[0].last_lines()[0])
        deadline = time.monotonic() + 10
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(pid)
