"""The two ways in: `launch.run` and the command line."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from keras_sparsity import launch
from keras_sparsity.launch.functions import Job
from keras_sparsity.launch.hosts import Host
from keras_sparsity.launch.remote import HostError, Remote
from tests import launch_functions
from tests.conftest import engines
from tests.launch_functions import is_running

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Every rank says who it is and does what the first argument says.
_SCRIPT = """\
import json, os, signal, sys, time
from keras_sparsity import collectives

ranks = collectives.current()
print(f"hello from rank {ranks.rank} of {ranks.size}, process {os.getpid()}",
      flush=True)
todo = sys.argv[1] if ranks.rank == 1 else "wait"
if sys.argv[1] == "arguments":
    print(json.dumps([sys.argv, sys.path[0], __name__, __file__]), flush=True)
elif sys.argv[1] == "variables":
    print(json.dumps(dict(os.environ)), flush=True)
elif todo == "exit":
    sys.exit(7)
elif todo == "raise":
    raise ValueError("no luck")
elif todo == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
else:
    time.sleep(600)
"""


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


def _run(*arguments, timeout=120, **variables):
    return subprocess.run(
        _command(*arguments),
        capture_output=True,
        text=True,
        timeout=timeout,
        env=_variables(**variables),
    )


def _said(text, start="hello"):
    return [line for line in text.splitlines() if line.startswith(start)]


# launch.run


@pytest.mark.parametrize("engine", engines())
def test_run_returns_the_results_by_rank(engine, capfd):
    results = launch.run(
        launch_functions.describe,
        2,
        engine,
        args=(1, "two"),
        kwargs={"three": 3},
        machines=2,
        timeout=120,
        env={"MINE": "given", "TF_NUM_INTRAOP_THREADS": "3"},
    )
    assert [r["rank"] for r in results] == [0, 1]
    assert [r["cross"] for r in results] == [(0, 2), (1, 2)]
    for result in results:
        assert result["size"] == 2
        assert result["engine"] == engine
        assert result["local"] == (0, 1)
        assert result["args"] == (1, "two")
        assert result["kwargs"] == {"three": 3}
        assert result["variable"] == "given"
        assert result["threads"] == "3"
    # One program: the same random numbers, the same order of sets.
    assert results[0]["random"] == results[1]["random"]
    assert results[0]["hash"] == results[1]["hash"]
    assert len({r["process"] for r in results} | {os.getpid()}) == 3
    output, errors = capfd.readouterr()
    assert _said(output, "output of") == ["output of rank 0"]
    assert _said(errors, "errors of") == ["errors of rank 0"]


def test_run_raises_with_the_failing_ranks_traceback():
    with pytest.raises(launch.LaunchError) as error:
        launch.run(launch_functions.fail, 2, args=(1,), timeout=120)
    message = str(error.value)
    assert "ValueError: no luck on rank 1" in message
    assert 'launch_functions.py", line' in message


def test_run_raises_when_a_rank_is_killed():
    start = time.monotonic()
    with pytest.raises(launch.LaunchError) as error:
        launch.run(launch_functions.die, 2, args=(1,), timeout=120)
    message = str(error.value)
    assert message.startswith("Rank 1 of 2 was killed by SIGKILL")
    assert "these are my last words" in message
    assert time.monotonic() - start < 60


def test_run_says_where_ranks_were_when_the_time_is_over():
    with Job(launch_functions.hang, 1, args=(0,)) as job:
        (process,) = job.processes.processes
        while "hanging" not in process.last_lines():
            assert not job.processes.failed()
            time.sleep(0.1)
        with pytest.raises(launch.LaunchError) as error:
            job.wait(timeout=0.5)
    message = str(error.value)
    assert "Not done within 0.5 seconds" in message
    assert "rank 0 was still running" in message
    assert "time.sleep(600)" in message


def test_run_takes_a_function_of_the_script_itself(tmp_path):
    path = tmp_path / "main.py"
    path.write_text(
        textwrap.dedent("""\
        from keras_sparsity import launch

        class Own:
            value = 20

        def function(own):
            return own.value + 1

        if __name__ == "__main__":
            print("results", launch.run(function, 1, args=(Own(),)))
        """)
    )
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        env=_variables(),
    )
    assert _said(done.stdout, "results") == ["results [21]"], done.stderr


# The command line


def test_a_script_gets_its_arguments(script, tmp_path):
    logs = tmp_path / "logs"
    words = ["arguments", "-n", "3", "--", "--engine=x", "a b"]
    done = _run("-n", "2", "--log-dir", str(logs), script, *words)
    assert done.returncode == 0, done.stderr
    assert len(_said(done.stdout)) == 1
    assert "rank 0 of 2" in done.stdout
    assert json.loads(_said(done.stdout, "[")[0]) == [
        [script, *words],
        str(tmp_path),
        "__main__",
        script,
    ]
    assert os.listdir(logs) == ["rank-1.log"]
    assert "rank 1 of 2" in (logs / "rank-1.log").read_text()


def test_horovod_and_a_module(script, tmp_path):
    pytest.importorskip("horovod")
    done = _run(
        *("-n", "2", "--engine", "horovod", "-m", "script", "arguments"),
        PYTHONPATH=os.pathsep.join([_ROOT, str(tmp_path)]),
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 2" in done.stdout
    assert json.loads(_said(done.stdout, "[")[0])[0] == [script, "arguments"]


@pytest.mark.parametrize(
    ("what", "exit_code", "said"),
    [
        ("exit", 7, "rank 1 of 2 exited with code 7"),
        ("raise", 1, "rank 1 of 2 exited with code 1"),
        ("kill", 137, "rank 1 of 2 was killed by SIGKILL"),
    ],
)
def test_a_failing_rank_is_shown_and_ends_the_others(
    what, exit_code, said, script
):
    done = _run("-n", "2", script, what)
    assert done.returncode == exit_code, done.stderr
    assert said in done.stderr
    # Its last lines are there, though it wrote to a file.
    assert "  | hello from rank 1" in done.stderr
    if what == "raise":
        assert "  | ValueError: no luck" in done.stderr
        assert "_child.py" not in done.stderr


def test_a_script_that_takes_too_long(script):
    done = _run("-n", "1", "--timeout", "0.5", script, "wait")
    assert done.returncode == 124
    assert "not done within 0.5 seconds" in done.stderr


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
    with _running("-n", "2", script, "wait") as (launcher, pids):
        assert len(pids) == 2
        launcher.send_signal(signal_number)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == exit_code
    assert ("KeyboardInterrupt" in errors) == (signal_number == signal.SIGINT)
    assert _wait_for_end(pids, 1)


def test_ranks_do_not_outlive_the_launcher(script):
    with _running("-n", "2", script, "wait") as (launcher, pids):
        assert len(pids) == 2
        launcher.kill()
        assert _wait_for_end(pids, 30)


def test_horovod_that_is_not_installed(script, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        launch.main(["run", "-n", "2", "--engine", "horovod", script])
    told = capsys.readouterr().err
    assert "pip install 'keras-sparsity[horovod]'" in told


# Other machines


@pytest.fixture
def ssh(tmp_path):
    """A stand-in for the ssh client, which runs the command here.

    As behind a real one there is nothing of our environment.
    """
    path = tmp_path / "ssh"
    path.write_text(
        textwrap.dedent("""\
        #!/bin/sh
        host=$1
        shift
        case $host in
        down)
            echo "ssh: connect to host down: Connection refused" >&2
            exit 255 ;;
        old)
            cat > /dev/null
            echo "Welcome to this host."
            echo '{"versions": {"python": "3.9.1"}, "has_script": false}'
            exit 0 ;;
        esac
        exec env -i HOME="$HOME" PATH="$PATH" sh -c "$*"
        """)
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("engine", engines())
def test_two_hosts_over_ssh(engine, ssh, script, tmp_path):
    # Two names of this machine that are not taken for it.
    hostfile = tmp_path / "hosts"
    hostfile.write_text("127.0.0.2: 5,\n127.0.0.3: 6,7\n")
    logs = tmp_path / "logs"
    done = _run(
        *("--hostfile", str(hostfile), "--ssh", ssh, "--engine", engine),
        *("--env", "MINE", "--env", "YOURS=a b'c", "--log-dir", str(logs)),
        *(script, "variables"),
        MINE="given",
        NOT_MINE="kept",
        TF_CPP_VMODULE="none=0",
        HOROVOD_GLOO_IFACE="lo",
    )
    assert done.returncode == 0, done.stderr
    outputs = [done.stdout]
    outputs += [(logs / f"rank-{rank}.log").read_text() for rank in (1, 2)]
    for rank, output in enumerate(outputs):
        assert f"rank {rank} of 3" in output
        variables = json.loads(_said(output, "{")[0])
        assert variables["CUDA_VISIBLE_DEVICES"] == ("5", "6,7", "6,7")[rank]
        assert variables["MINE"] == "given"
        assert variables["YOURS"] == "a b'c"
        assert variables["TF_CPP_VMODULE"] == "none=0"
        assert "NOT_MINE" not in variables


def test_a_rank_that_fails_behind_ssh(ssh, script):
    done = _run(
        *("--hosts", "localhost:1,127.0.0.3:1", "--ssh", ssh, script, "exit")
    )
    assert done.returncode == 7, done.stderr
    assert "rank 1 of 2 exited with code 7 on 127.0.0.3" in done.stderr


def test_every_host_that_cannot_take_part_is_named(ssh, script):
    done = _run(
        *("--hosts", "localhost:1,down:2,old:1,127.0.0.3:1"),
        *("--python", "/missing/python", script, "wait"),
        KERAS_SPARSITY_SSH=ssh,
    )
    assert done.returncode == 1
    assert "hello" not in done.stdout
    for problem in (
        "down: not reachable by ssh: ssh: connect to host down: Connection",
        "127.0.0.3: no Python at /missing/python",
        "old: has python 3.9.1, the first host has",
        f"has no {script}",
    ):
        assert problem in done.stderr


def test_a_missing_ssh_client_is_said():
    remote = Remote(ssh="/missing/ssh")
    with pytest.raises(HostError, match="a: cannot run /missing/ssh"):
        remote.check([Host("a")], "native", {})
