"""A process that acts while this one cannot.

TensorFlow holds Python's lock while it starts its collectives, so none of
this process's threads runs then. The helper starts in milliseconds: it runs a
function of a file that imports the standard library alone.
"""

import contextlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading


@contextlib.contextmanager
def running(function, *args, pass_fds=()):
    """Runs `function(is_over, *args)` in a helper process while entered.

    Args:
        function: A function at the top level of a file that imports the
            standard library alone. It returns when `is_over(seconds)`, which
            waits that long, is true: this process ends, or has ended.
        *args: Its arguments, as JSON has them.
        pass_fds: File descriptors that the helper inherits.
    """
    code = function.__code__
    call = json.dumps([code.co_filename, code.co_name, args])
    helper = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        stdin=subprocess.PIPE,
        pass_fds=pass_fds,
    )
    # Every user of the machine may read a command line, and addresses hold
    # secrets. This input closes when this process ends.
    with contextlib.suppress(BrokenPipeError):
        helper.stdin.write(f"{call}\n".encode())
        helper.stdin.flush()
    try:
        yield
    finally:
        helper.kill()
        helper.stdin.close()
        helper.wait()


@contextlib.contextmanager
def ends_by_ctrl_c():
    """While entered, Ctrl-C ends this process, also where no Python runs.

    Python's own handler waits until TensorFlow's call has ended. One that the
    program has set stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if not is_main or before is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _is_over(seconds):
    return bool(select.select([sys.stdin], [], [], seconds)[0])


if __name__ == "__main__":
    # Unbuffered, as `select` does not see Python's buffer.
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1) or sys.exit()
    path, name, arguments = json.loads(line)
    runpy.run_path(path)[name](_is_over, *arguments)
