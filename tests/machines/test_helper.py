"""The helper process runs a function, and ends with this process."""

import os
import signal
import subprocess
import sys
import time

from keras_sparsity.machines import helper
from tests.launch_functions import is_running

# A file that imports the standard library alone, in place of arrival.py.
_TASK = """\
import os
def write(is_over, path, text, descriptor):
    has_descriptor = os.path.exists(f"/dev/fd/{descriptor}")
    with open(path + ".part", "w") as file:
        file.write(f"{text} {os.getpid()} {has_descriptor}")
    os.replace(path + ".part", path)
    while not is_over(10):
        pass
"""


def _write(folder):
    path = folder / "task.py"
    path.write_text(_TASK)
    scope = {}
    exec(compile(_TASK, path, "exec"), scope)
    return scope["write"]


def _words(path):
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return path.read_text().split()


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_function_runs_while_entered(tmp_path):
    reading, writing = os.pipe()
    out = tmp_path / "out"
    with helper.running(
        _write(tmp_path), str(out), "hello", reading, pass_fds=[reading]
    ):
        said, pid, has_descriptor = _words(out)
        assert (said, has_descriptor) == ("hello", "True")
        assert int(pid) != os.getpid() and _runs(int(pid))
    assert not _runs(int(pid))
    for descriptor in (reading, writing):
        os.close(descriptor)


def test_it_ends_with_a_process_that_is_killed(tmp_path):
    _write(tmp_path)
    out = tmp_path / "out"
    program = (
        "import os, runpy, signal, sys, time\n"
        "sys.argv[0] = 'keras-sparsity'\n"
        "from keras_sparsity.machines import helper\n"
        f"write = runpy.run_path({str(tmp_path / 'task.py')!r})['write']\n"
        f"with helper.running(write, {str(out)!r}, 'hello', 0):\n"
        f"    while not os.path.exists({str(out)!r}): time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(helper.__file__)))
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": root},
        timeout=60,
    )
    pid = int(_words(out)[1])
    deadline = time.monotonic() + 15
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


# `PyDLL` keeps Python's lock, as TensorFlow does while it waits for ranks.
_WAITING = """\
import ctypes, runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
with runpy.run_path({path!r})["ends_by_ctrl_c"]():
    print("waits", flush=True)
    ctypes.PyDLL(None).sleep(60)
"""


def test_ctrl_c_ends_a_process_in_which_no_python_runs():
    code = _WAITING.format(path=helper.__file__)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == -signal.SIGINT


def test_the_programs_own_handler_stays():
    def own(number, frame):
        pass

    for handler, inside in (
        (signal.default_int_handler, signal.SIG_DFL),
        (own, own),
    ):
        before = signal.signal(signal.SIGINT, handler)
        try:
            with helper.ends_by_ctrl_c():
                assert signal.getsignal(signal.SIGINT) is inside
            assert signal.getsignal(signal.SIGINT) is handler
        finally:
            signal.signal(signal.SIGINT, before)
