"""What this process is doing, seen from a thread of its own."""

import os
import sys
import sysconfig
import threading
import time

import tensorflow as tf

from keras_sparsity.collectives import errors, verdict
from keras_sparsity.collectives.journal import noted

# Computing takes a whole core, an idle Horovod thread up to half of one.
_BUSY_CORES = 0.6

# An error that ended a call is asked about soon, or nobody wants to know.
_EXPLAIN_SECONDS = 1.0

# In these a call may be open though Python is not in TensorFlow.
_CALLS = (noted.__code__, errors.explain.__code__)

_TENSORFLOW = os.path.dirname(os.path.abspath(tf.__file__)) + os.sep
_NOT_THE_USERS = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    | {os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
)


class Observer:
    """Makes the `Report` of this rank.

    Args:
        journal: The `Journal` of its calls.
    """

    def __init__(self, journal):
        self._journal = journal
        self._moved_at = self._left_open_at = time.monotonic()
        self._open = []
        self._left_open = []
        self._cpu = self._cpu_at = 0.0
        self._is_busy = False

    def look(self, closely=False):
        """Returns a `Report`; its time runs from the last call that moved.

        Args:
            closely: Whether to name calls that have only just begun.
        """
        now = time.monotonic()
        self._look_at_cpu(now)
        if self._journal.has_moved():
            self._moved_at = now
            self._open = self._journal.open_sites()
        # Else no other one has begun, and none but these need be read.
        self._forget_stale(now)
        report = verdict.Report(
            stalled_seconds=now - self._moved_at,
            busy=self._is_busy,
            place=_place(),
        )
        open_sites = self._still_open()
        if open_sites and (closely or self._moved_at != now):
            report.status = "blocked"
            report.open_calls = tuple(s.current_call() for s in open_sites)
            report.upcoming = tuple(self._journal.upcoming(open_sites))
        return report

    def _still_open(self):
        return [site for site in self._open if site.is_open()]

    def _forget_stale(self, now):
        """Stops waiting for calls that ended by an error nobody reported."""
        before = [(site, site.counts()) for site in self._still_open()]
        if _is_in_call():
            before = []
        if before != self._left_open:
            # Of a call that failed since, the program may yet ask why.
            self._left_open, self._left_open_at = before, now
        elif now - self._left_open_at > _EXPLAIN_SECONDS:
            for site, counts in before:
                site.forget(counts)

    def _look_at_cpu(self, now):
        seconds = now - self._cpu_at
        if seconds < 0.4:
            return
        cpu = time.process_time()
        self._is_busy = cpu - self._cpu > _BUSY_CORES * seconds
        self._cpu, self._cpu_at = cpu, now


def _is_in_call():
    """Whether any thread may be in a collective."""
    if not tf.config.experimental.get_synchronous_execution():
        return True
    return any(map(_frame_is_in_call, sys._current_frames().values()))


def _frame_is_in_call(frame):
    # The one that called into TensorFlow's C++ is TensorFlow's own.
    if frame.f_code.co_filename.startswith(_TENSORFLOW):
        return True
    while frame is not None:
        if frame.f_code in _CALLS:
            return True
        frame = frame.f_back
    return False


def _place():
    """The line of the user's program the main thread is at."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame is not None:
        path = frame.f_code.co_filename
        if not (path.startswith(("<", *_NOT_THE_USERS)) or _generated(path)):
            name = os.path.relpath(path) if _is_near(path) else path
            return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _generated(path):
    return os.path.basename(path).startswith("__autograph_generated")


def _is_near(path):
    return os.path.abspath(path).startswith(os.getcwd() + os.sep)
