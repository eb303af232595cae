"""The state of this process, observed from another thread."""

import gc
import os
import sys
import sysconfig
import threading
import time

import tensorflow as tf

from keras_sparsity.health import errors
from keras_sparsity.health.journal import Journal
from keras_sparsity.health.report import Report

# Computing uses a whole core, an idle Horovod thread up to half of one.
_BUSY_CORES = 0.6

# A program that catches a call's error and does not ask `errors.explain` within
# this time goes on without it.
_EXPLAIN_SECONDS = 1.0

_RUN = Journal.run.__wrapped__.__code__
# While these run, a call may be open though Python is not in TensorFlow.
_CALLS = (_RUN, errors.explain.__code__)

_TENSORFLOW = os.path.dirname(os.path.abspath(tf.__file__)) + os.sep
_NOT_THE_USERS = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    | {os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
)


class Observer:
    """Makes the `Report` of this rank."""

    def __init__(self, journal):
        self._journal = journal
        self._moved_at = self._left_open_at = time.monotonic()
        self._open = []
        self._left_open = []
        self._cpu = self._cpu_at = 0.0
        self._is_busy = False

    def look(self, closely=False, calls=()):
        """The `Report` of this rank.

        Args:
            closely: Whether to include calls that began since the last look.
            calls: those that other ranks are in; `Report.left` has them.
        """
        now = time.monotonic()
        self._look_at_cpu(now)
        if self._journal.has_moved():
            self._moved_at = now
            self._open = self._journal.open_sites()
        # Otherwise no other call has begun, and only these are read again.
        self._forget_stale(now)
        report = Report(
            stalled_seconds=now - self._moved_at,
            busy=self._is_busy,
            place=_place(),
        )
        if calls:
            counts = self._journal.counts(calls)
            report.left = tuple(
                (call, over)
                for call, (_, over) in zip(calls, counts, strict=True)
            )
        open_sites = self._still_open()
        if open_sites and (closely or self._moved_at != now):
            report.status = "blocked"
            report.open_calls = tuple(s.current_call() for s in open_sites)
            report.upcoming = tuple(self._journal.upcoming(open_sites))
            counts = self._journal.counts(report.open_calls)
            report.begun = tuple(begun for begun, _ in counts)
            if self._journal.has_failed():
                report.note = "before that, an error has ended other calls"
        return report

    def _still_open(self):
        return [site for site in self._open if site.is_open()]

    def _forget_stale(self, now):
        """Forgets calls that ended by an error that nobody reported."""
        under_way = _sites_under_way()
        before = [
            (site, site.counts())
            for site in (self._still_open() if under_way is not None else ())
            if site not in under_way
        ]
        if before != self._left_open:
            # The program may still ask for the reason of a new failure.
            self._left_open, self._left_open_at = before, now
        elif now - self._left_open_at > _EXPLAIN_SECONDS:
            for site, counts in before:
                self._journal.forget(site, counts)

    def _look_at_cpu(self, now):
        seconds = now - self._cpu_at
        if seconds < 0.4:
            return
        cpu = time.process_time()
        self._is_busy = cpu - self._cpu > _BUSY_CORES * seconds
        self._cpu, self._cpu_at = cpu, now


def _sites_under_way():
    """The eager calls' sites that threads are in; None if they may be in more.

    A thread in a traced function may be in any of its calls.
    """
    if not tf.config.experimental.get_synchronous_execution():
        return None
    frames = filter(_frame_is_in_call, _frames().values())
    sites = [_eager_site(frame) for frame in frames]
    return None if None in sites else sites


def _eager_site(frame):
    while frame is not None:
        if frame.f_code is _RUN:
            site = frame.f_locals["site"]
            return site if site.scope is None else None
        frame = frame.f_back
    return None


def _frames():
    """The threads' frames, during which no garbage is collected.

    Up to Python 3.11.8 `sys._current_frames` may collect garbage. It holds a
    lock for which garbage may wait, such as a `threading.local`, of which each
    `tf.Graph` has one; then all threads stand still
    (https://github.com/python/cpython/issues/106883).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def _frame_is_in_call(frame):
    # The innermost frame above TensorFlow's C++ is TensorFlow's own.
    if frame.f_code.co_filename.startswith(_TENSORFLOW):
        return True
    while frame is not None:
        if frame.f_code in _CALLS:
            return True
        frame = frame.f_back
    return False


def _place():
    """The main thread's current line in the user's program."""
    frame = _frames().get(threading.main_thread().ident)
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
