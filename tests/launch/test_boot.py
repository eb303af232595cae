"""What a rank does first: ends with its launcher, imports as `python` does."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import zipfile

import pytest

from keras_sparsity import launch
from keras_sparsity.launch import _boot, processes, rank_process
from tests import launch_functions
from tests.launch_functions import is_running

_ROOT = str(pathlib.Path(__file__).parents[2])
# Ten minutes take those that do not end with the launcher. How long it takes to
# end them, `test_all_end_within_ten_seconds` says; a busy machine takes longer.
_SECONDS = 40

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
                       "ports": {ports}, "connection": [], "addresses": []}}))
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


def _leads_its_group(pid):
    with contextlib.suppress(ProcessLookupError):  # It has ended meanwhile.
        return os.getpgid(pid) == pid
    return False


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


def test_all_end_within_ten_seconds():
    """As the documentation says."""
    assert processes.GRACE_SECONDS + rank_process.CLIENT_SECONDS < 10
    assert _boot._LOOK_SECONDS + _boot._ORPHAN_GRACE_SECONDS < 10


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


def _listens(port):
    lines = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            with open(f"/proc/net/{name}") as file:
                lines += file
    fields = [line.split() for line in lines]
    is_listening = "0A"
    return any(
        local.endswith(f":{port:04X}") and state == is_listening
        for _, local, _, state, *_ in fields
    )


def test_a_rank_that_waits_for_others_ends_with_the_launcher(tmp_path):
    """While TensorFlow starts its collectives: another rank does not come."""
    script = tmp_path / "script.py"
    script.write_text("")
    with contextlib.ExitStack() as stack:
        launched = {}
        for end in ("SIGKILL", "SIGINT"):
            folder = tmp_path / end
            folder.mkdir()
            (folder / "tensorflow.py").write_text(_STUCK)
            launched[end] = stack.enter_context(
                _started(
                    *("-n", "2", str(script)),
                    env=_variables(folder, STUCK_RANK="1"),
                )
            )
        pids = {}
        for end, launcher in launched.items():
            stuck = _wait_for_pids(launcher, tmp_path / end, 2)
            found = _descendants(launcher.pid)
            (first,) = set(filter(_leads_its_group, found)) - {*stuck}
            with open(f"/proc/{first}/environ") as file:
                variables = dict(
                    entry.split("=", 1)
                    for entry in file.read().split("\0")[:-1]
                )
            config = json.loads(variables["TF_CONFIG"])
            port = int(config["cluster"]["worker"][0].rpartition(":")[2])
            deadline = time.monotonic() + 100
            while not _listens(port):
                assert launcher.poll() is None, launcher.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            pids[end] = {*found, *stuck, *_in_groups([first, *stuck])}
        for end, launcher in launched.items():
            launcher.send_signal(getattr(signal, end))
            launcher.wait(_SECONDS)
        for end in launched:
            assert not _still_running(pids[end]), end


# The import path.

# In place of TensorFlow: tells where modules are looked for when it is
# imported, and ends the rank.
_TELL = """\
import json, sys
print(json.dumps([sys.path, json.__file__]), flush=True)
sys.exit(0)
"""
# In the working folder: each of them breaks TensorFlow, or the launcher.
_SHADOWS = (
    *("argparse", "dataclasses", "json", "keras", "keras_sparsity", "numpy"),
    *("pickle", "random", "shlex", "socket", "tempfile", "tensorflow", "token"),
)


@pytest.fixture
def folders(tmp_path):
    """Folders of a script, of the working process, and in PYTHONPATH."""
    for name in ("elsewhere", "working", "path", "bin"):
        (tmp_path / name).mkdir()
    # As pip writes it.
    (tmp_path / "bin" / "keras-sparsity").write_text(
        "import sys\nfrom keras_sparsity.launch import main\nsys.exit(main())\n"
    )
    for name in _SHADOWS:
        path = tmp_path / "working" / f"{name}.py"
        path.write_text("raise SystemExit('of the working folder')\n")
    (tmp_path / "path" / "tensorflow.py").write_text(_TELL)
    return tmp_path


def _told(command, **options):
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=100,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


_RUN = ("run", "-n", "1")


@pytest.mark.parametrize("is_safe", [False, True], ids=["", "safe path"])
@pytest.mark.parametrize(
    "kind", ["script", "link", "folder", "archive", "by module"]
)
def test_a_script_finds_modules_as_in_python(kind, is_safe, folders):
    if is_safe and sys.version_info < (3, 11):
        pytest.skip("Python 3.10 has no safe path")
    script = folders / "elsewhere" / "__main__.py"
    script.write_text("import tensorflow")
    target = script
    if kind == "link":
        target = folders / "path" / "link.py"
        target.symlink_to(script)
    elif kind == "folder":
        target = script.parent
    elif kind == "archive":
        target = folders / "archive.zip"
        with zipfile.ZipFile(target, "w") as archive:
            archive.write(script, "__main__.py")
    options = {
        "cwd": folders / "working",
        "env": _variables(
            folders / "path", **({"PYTHONSAFEPATH": "1"} if is_safe else {})
        ),
    }
    command = [folders / "bin" / "keras-sparsity"]
    if kind == "by module":
        # By then Python itself has looked for that module there.
        (folders / "working" / "keras_sparsity.py").unlink()
        command = ["-m", "keras_sparsity.launch"]
    expected = _told([target], **options)
    found = _told([*command, *_RUN, target], **options)
    if kind in ("folder", "archive"):
        # `runpy` adds it when the program begins.
        found[0].insert(0, expected[0][0])
    assert found == expected


def test_a_module_finds_modules_as_in_python(folders):
    options = {
        "cwd": folders / "elsewhere",
        "env": _variables(folders / "path"),
    }
    (folders / "elsewhere" / "program.py").write_text("import tensorflow")
    command = [folders / "bin" / "keras-sparsity", *_RUN]
    expected = _told(["-m", "program"], **options)
    assert _told([*command, "-m", "program"], **options) == expected


def test_a_function_finds_modules_as_its_caller(folders, monkeypatch, capfd):
    monkeypatch.chdir(folders / "working")
    monkeypatch.syspath_prepend(str(folders / "path"))
    launch.run(launch_functions.double, 1, args=(3,), timeout=100)
    path, _ = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert path == [os.path.abspath(folder) for folder in sys.path]


def test_a_program_runs_beside_modules_of_any_name(folders):
    """All the way, with the real TensorFlow."""
    (folders / "path" / "tensorflow.py").unlink()
    script = folders / "elsewhere" / "script.py"
    script.write_text(
        "import json, sys, token, neighbour\n"
        "print(json.dumps([sys.path, token.__file__, neighbour.__file__]))"
    )
    (script.parent / "neighbour.py").write_text("")
    options = {
        "cwd": folders / "working",
        "env": _variables(folders / "path"),
    }
    command = [folders / "bin" / "keras-sparsity", *_RUN]
    expected = _told([script], **options)
    assert _told([*command, script], **options) == expected
