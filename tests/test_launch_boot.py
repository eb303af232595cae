"""What a rank does first: ends with its launcher, imports as `python` does."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.launch_functions import is_running

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SECONDS = 10

# In place of TensorFlow: holds Python's lock as TensorFlow does while it starts
# its collectives, for ever, and no signal that may be ignored ends it. Nor the
# process that it has started.
_STUCK = """\
import ctypes, os, signal, subprocess, sys
folder = os.path.dirname(os.path.abspath(__file__))
if sys.argv[1:2] == ["probe"] or os.environ.get("STUCK_RANK", "") not in (
    "", os.environ["TF_CONFIG"][-3]
):
    sys.path.remove(folder)
    del sys.modules["tensorflow"]
    import tensorflow
else:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"])
    for pid in (os.getpid(), child.pid):
        open(os.path.join(folder, f"{pid}.pid"), "w").close()
    ctypes.PyDLL(None).sleep(600)
"""

# In place of ssh: relays its input, as ssh does, and answers the check.
_SSH = """\
#!{python}
import json, os, subprocess, sys, threading
greeting = sys.stdin.buffer.readline()
if json.loads(greeting)["arguments"][0] == "probe":
    print(json.dumps({{"versions": {{}}, "has_script": True, "num_cores": 1,
                       "ports": {ports}, "connection": []}}))
    sys.exit()
far = subprocess.Popen(sys.argv[2], shell=True, stdin=subprocess.PIPE,
                       start_new_session=True)
def relay():
    far.stdin.write(greeting)
    far.stdin.flush()
    while letter := os.read(0, 1):
        far.stdin.write(letter)
        far.stdin.flush()
    far.stdin.close()
threading.Thread(target=relay, daemon=True).start()
code = far.wait()
sys.stdout.flush()
os._exit(code if code >= 0 else 128 - code)
"""


def _variables(*paths, **more):
    paths = [*map(str, paths), _ROOT, os.environ.get("PYTHONPATH")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        **more,
    }


@contextlib.contextmanager
def _started(*arguments, **options):
    with subprocess.Popen(
        [sys.executable, "-m", "keras_sparsity.launch", "run", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # As from a terminal; a shell's background job ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.default_int_handler
        ),
        **options,
    ) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()


def _wait_for_pids(launcher, folder, count, seconds=60):
    deadline = time.monotonic() + seconds
    while True:
        pids = [int(path.stem) for path in folder.glob("*.pid")]
        if len(pids) == count:
            return pids
        assert launcher.poll() is None, launcher.stderr.read()
        assert time.monotonic() < deadline, "not stuck yet"
        time.sleep(0.05)


def _descendants(pid):
    """Of one process, at this moment."""
    parents = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(name))
    found = []
    todo = [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def _in_groups(pids):
    """Processes in the process groups of `pids`: their guards too."""
    groups = {os.getpgid(pid) for pid in pids}
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.getpgid(int(name)) in groups:
                found.append(int(name))
    return found


def _still_running(pids, seconds=_SECONDS):
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if is_running(pid)]


_ENDS = ("SIGKILL", "SIGINT", "SIGTERM", "SIGHUP")


@pytest.mark.parametrize("where", ["here", "behind ssh"])
def test_ranks_that_are_stuck_end_with_the_launcher(where, tmp_path):
    """Before there is TensorFlow, deaf, and holding Python's lock."""
    script = tmp_path / "script.py"
    script.write_text("")
    ssh = tmp_path / "ssh"
    ssh.write_text(_SSH.format(python=sys.executable, ports=[18000, 18001]))
    ssh.chmod(0o755)
    with contextlib.ExitStack() as stack:
        launched = {}
        for end in _ENDS:
            folder = tmp_path / end
            folder.mkdir()
            (folder / "tensorflow.py").write_text(_STUCK)
            to = ["-n", "2"]
            if where != "here":
                to = ["--hosts", "there:2", "--ssh", str(ssh)]
            launched[end] = stack.enter_context(
                _started(*to, str(script), env=_variables(folder))
            )
        pids = {}
        for end, launcher in launched.items():
            # Two ranks, and what each has started.
            ranks = _wait_for_pids(launcher, tmp_path / end, 4)
            pids[end] = {launcher.pid, *_descendants(launcher.pid)}
            pids[end] |= {*ranks, *_in_groups(ranks)}
        for end, launcher in launched.items():
            launcher.send_signal(getattr(signal, end))
        begin = time.monotonic()
        for end in _ENDS:
            left = begin + _SECONDS - time.monotonic()
            # The launcher itself is reaped here.
            with contextlib.suppress(subprocess.TimeoutExpired):
                launched[end].wait(max(left, 0))
            left = begin + _SECONDS - time.monotonic()
            assert not _still_running(pids[end], left), end
            number = getattr(signal, end)
            is_killed = number == signal.SIGKILL
            code = -number if is_killed else 128 + number
            assert launched[end].returncode == code
