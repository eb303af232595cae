"""Ranks forked from a process that has imported TensorFlow.

The import is most of a rank's start, some 4 s of processor time. What users
start, and most ranks of the launcher's own tests, are fresh processes.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
import types
from multiprocessing import reduction
from unittest import mock

import numpy as np
import pytest

from keras_sparsity.launch import _boot, _child, environment

if importlib.util.find_spec("horovod") is not None:
    import horovod.tensorflow  # noqa: F401  # loads its library

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])
_LOCK = threading.Lock()


@contextlib.contextmanager
def ranks():
    """While entered, the launcher forks what it would start."""
    module = "keras_sparsity.launch.rank_process"
    with mock.patch(f"{module}.subprocess.Popen", _Popen):
        yield


def _of_the_server():
    """Variables of the process that is forked, which the first fork starts."""
    # No threads: a fork has but one.
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return environment.shared(one)


class _Popen:
    """What `RankProcess` uses of `subprocess.Popen`."""

    def __init__(
        self, command, env, stdin, stdout, stderr, pass_fds, start_new_session
    ):
        (lifeline,) = pass_fds
        arguments = command[command.index(_boot.__file__) + 1 :]
        files = [
            _Sent(file.fileno() if file else inherited)
            for file, inherited in ((stdout, 1), (stderr, 2))
        ]
        self._process = _CONTEXT.Process(
            target=_run, args=(arguments, env, *files, _Sent(lifeline))
        )
        self._process.daemon = True
        # Not `mock.patch.dict`, which empties the dictionary for a moment: an
        # import in another thread would then load a second copy of a module.
        with _LOCK, pytest.MonkeyPatch.context() as patch:
            for name, value in _of_the_server().items():
                patch.setenv(name, value)
            # Else the fork would import the program's main module, which may
            # use TensorFlow before the engine is up.
            patch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
            self._process.start()
        # Whoever ends it ends its group, so that must be there.
        with contextlib.suppress(ProcessLookupError):  # It has ended already.
            while os.getpgid(self.pid) != self.pid:
                time.sleep(0.001)

    @property
    def pid(self):
        return self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout)
        return self.returncode


class _Sent:
    """A file descriptor, which arrives as the other process's number."""

    def __init__(self, descriptor):
        self._descriptor = descriptor

    def __reduce__(self):
        return _received, (reduction.DupFd(self._descriptor),)


def _received(duplicate):
    return duplicate.detach()


def _run(arguments, variables, stdout, stderr, lifeline):
    """In the fork: becomes what the command and its variables would start."""
    os.setsid()
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(variables)
    os.environ[_boot.LIFELINE_VARIABLE] = str(lifeline)
    _boot.hold_lifeline()
    # A fresh process has random states of its own.
    random.seed()
    np.random.seed()
    # Nothing of this is ever garbage.
    gc.freeze()
    kind, _, target, *_ = arguments
    _boot.set_import_path(kind, target)
    try:
        _child.main(arguments)
    finally:
        # A forked process ends without.
        atexit._run_exitfuncs()
