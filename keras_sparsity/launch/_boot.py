"""The start of a rank's process, run by this file's path.

From its first moment on, a rank ends when its launcher does: also while it
imports TensorFlow, which takes seconds, and while TensorFlow starts its
collectives, which holds Python's lock. So a small forked process, the guard,
watches the launcher. This file imports the standard library alone, never from
the working folder.
"""

import os
import select
import signal
import sys
import threading
import time

LIFELINE_VARIABLE = "KERAS_SPARSITY_LIFELINE"
# Path of the file to which rank 0 writes the error that it shows.
SHOWN_ERROR_VARIABLE = "KERAS_SPARSITY_SHOWN_ERROR"
# Letters of the launcher on the lifeline.
DUMP_LETTER = b"D"
SIGNALS = {
    b"I": signal.SIGINT,
    b"T": signal.SIGTERM,
    b"H": signal.SIGHUP,
    b"K": signal.SIGKILL,
}
_ORPHAN_GRACE_SECONDS = 3.0
# Interval at which the guard checks its rank.
_LOOK_SECONDS = 1.0
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def main():
    """Prepares the process, and then runs `_child.main`."""
    if not is_path_safe():
        del sys.path[0]  # the folder of this file
    hold_lifeline()
    # Ctrl-C before the program's first line needs no traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    kind, _, target, *_ = sys.argv[1:]
    set_import_path(kind, target)
    _import_package()
    from keras_sparsity.launch import _child

    _child.main(sys.argv[1:])


def is_path_safe():
    """Whether Python runs with `-P` or PYTHONSAFEPATH."""
    return getattr(sys.flags, "safe_path", False)  # Python 3.11


def hold_lifeline():
    """Makes this process and its children end with the launcher."""
    lifeline = os.environ.pop(LIFELINE_VARIABLE, None)
    if lifeline is None:
        return
    try:
        # Behind ssh this is not yet a group of its own.
        os.setpgid(0, 0)
    except PermissionError:
        pass  # It leads its session already.
    lifeline = int(lifeline)
    if lifeline == 0:
        lifeline = os.dup(0)  # Standard input is the program's.
        _to_nowhere(0)
    requests, requesting = os.pipe()
    pid = os.fork()
    if pid == 0:
        # Not as a child of the rank, whose program may wait for all children.
        if os.fork() == 0:
            _Guard(lifeline, requesting).run()
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(lifeline)
    os.close(requesting)
    threading.Thread(
        target=_serve_requests,
        args=(requests,),
        name="keras_sparsity lifeline",
        daemon=True,
    ).start()


class _Guard:
    """The process that ends a rank's process group.

    It is in that group itself, so no other process gets the group's number,
    which is the rank's, while it lives.

    Args:
        lifeline: Pipe of the launcher's letters, which closes at its end.
        requesting: Pipe to the rank, for requests that it must serve.
    """

    def __init__(self, lifeline, requesting):
        self._lifeline, self._requesting = lifeline, requesting

    def run(self):
        try:
            self._prepare()
            while letter := self._next_letter():
                if letter == DUMP_LETTER:
                    os.write(self._requesting, letter)
                elif letter in SIGNALS:
                    os.killpg(0, SIGNALS[letter])
            os.killpg(0, signal.SIGTERM)
            deadline = time.monotonic() + _ORPHAN_GRACE_SECONDS
            while self._rank_runs() and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            os.killpg(0, signal.SIGKILL)

    def _prepare(self):
        # The guard ignores signals to its group.
        for number in signal.valid_signals():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                try:
                    signal.signal(number, signal.SIG_IGN)
                except (OSError, ValueError):
                    pass  # reserved by the C library
        for descriptor in (0, 1, 2):
            _to_nowhere(descriptor)
        first = 3
        for kept in sorted((self._lifeline, self._requesting)):
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))

    def _next_letter(self):
        """The next letter; empty when the launcher or the rank has ended."""
        while self._rank_runs():
            if select.select([self._lifeline], [], [], _LOOK_SECONDS)[0]:
                return os.read(self._lifeline, 1)
        return b""

    def _rank_runs(self):
        try:
            os.kill(os.getpgrp(), 0)
        except ProcessLookupError:
            return False
        return True


def _to_nowhere(descriptor):
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _serve_requests(requests):
    try:
        while os.read(requests, 1):
            _print_stacks()
    except OSError:
        pass  # The program has closed the pipe.


def _print_stacks():
    import gc
    import traceback

    # Garbage may block all threads here, see `health/observer.py`. The launcher
    # ends this process next.
    gc.disable()
    frames = sys._current_frames()
    for thread in threading.enumerate():
        # Without this package's threads, which always wait.
        if not thread.name.startswith("keras_sparsity"):
            stack = traceback.format_stack(frames.get(thread.ident))
            print(f"{thread.name} is at:\n{''.join(stack)}", file=sys.stderr)
    sys.stderr.flush()


def set_import_path(kind, target):
    """Sets `sys.path` as `python` does for the same program."""
    if kind == "call":
        import pickle

        with open(target, "rb") as file:
            sys.path[:] = pickle.load(file)["sys_path"]
    elif not is_path_safe():
        if kind == "module":
            sys.path.insert(0, os.getcwd())
        elif kind == "script" and not _is_folder_or_archive(target):
            sys.path.insert(0, os.path.dirname(os.path.realpath(target)))


def _is_folder_or_archive(path):
    """Whether `python` imports `__main__` from it."""
    import pkgutil

    return pkgutil.get_importer(path) is not None


def _import_package():
    """Imports this very package, even if `sys.path` has another one."""
    import importlib.machinery
    import importlib.util

    name, root = os.path.basename(_PACKAGE), os.path.dirname(_PACKAGE)
    if importlib.util.find_spec(name) is None:
        sys.path.append(root)  # for processes that the program starts
    spec = importlib.machinery.PathFinder.find_spec(name, [root])
    package = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    main()
