"""Ends every rank, with the reason, when the ranks can no longer go on.

Neither engine notices by itself that ranks wait in different collectives,
and what they say when a rank has died does not tell why. So each rank has a
thread that looks at its journal twice a second and, when nothing moves, tells
rank 0 what this rank is in. `coordinator.py` decides there, by the rules of
`verdict.py`, and tells all ranks.
"""

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time

import tensorflow as tf

from keras_sparsity.collectives import channel as channels
from keras_sparsity.collectives import errors, journal, verdict
from keras_sparsity.collectives.coordinator import Coordinator
from keras_sparsity.collectives.observer import Observer

_POLL_SECONDS = 0.5
# How long the program has to end by itself once it has been told.
_GRACE_SECONDS = 10.0
# Rank 0 explains a failed operation within about 3 s.
_EXPLAIN_SECONDS = 6.0

_watch = None


def start(collectives, abort, close, timeout_seconds):
    """Begins to watch this rank. A collective call, once per process.

    Args:
        collectives: The `Collectives` of all ranks.
        abort: Function of a message that makes blocked and later operations
            of the engine fail. Called from a thread.
        close: Function that leaves the engine, called at exit when all ranks
            have come to their end.
        timeout_seconds: How long a rank may keep others waiting that is not
            known to be lost.
    """
    global _watch
    channel, all_channels = channels.connect(
        collectives.rank, collectives.size, collectives.gather_objects
    )
    if all_channels:
        Coordinator(all_channels, timeout_seconds).start()
    _watch = _Watch(collectives.rank, channel, abort, close, timeout_seconds)
    _watch.start()


def set_timeout(seconds):
    """Changes the timeout; to be called on every rank, with the same value."""
    if _watch is not None:
        _watch.set_timeout(seconds)


def report_exception(error):
    """Tells all ranks that `error` ends this rank's program.

    For a caller that catches what would otherwise end the process.
    """
    if _watch is not None:
        _watch.report_exception(error)


class _Watch:
    """One rank's part: reports, and ends this process on a failure."""

    def __init__(self, rank, channel, abort, close, timeout_seconds):
        self._rank = rank
        self._channel = channel
        self._abort = abort
        self._close = close
        self._timeout_seconds = timeout_seconds
        self._journal = journal.current()
        self._observer = Observer(self._journal)
        self._pid = os.getpid()
        self._sent = None
        self._heard = time.monotonic()
        self._has_ended = False
        self._has_raised = False
        self._exit_code = 1
        self._note = ""
        self._is_over = threading.Event()
        self._announcing = threading.Lock()
        self._is_announced = False
        self._thread = threading.Thread(
            target=self._run, name="keras_sparsity watch", daemon=True
        )

    def start(self):
        self._next_hook = sys.excepthook
        sys.excepthook = self._on_exception
        self._next_thread_hook = threading.excepthook
        threading.excepthook = self._on_thread_exception
        atexit.register(self._on_exit)
        errors.set_inquiry(self._inquire)
        self._thread.start()

    def set_timeout(self, seconds):
        # By now rank 0 has spoken as often as the earlier one asked for.
        self._heard = time.monotonic()
        # At once, as rank 0 may be stopped before it tells anyone.
        self._timeout_seconds = seconds
        self._channel.send(kind="timeout", seconds=seconds)

    def report_exception(self, error):
        if self._is_mine() and not self._is_over.is_set():
            self._has_raised = True
            self._exit_code = _exit_code(error)
            self._channel.send(kind="raised", error=_spell(error))

    # The thread.

    def _run(self):
        try:
            failure = self._watch()
        except Exception:
            if not sys.is_finalizing():
                logging.getLogger(__name__).exception(
                    "The watch of rank %d ended by a mistake of its own; a "
                    "failure of another rank may now hang this one.",
                    self._rank,
                )
            return
        finally:
            self._is_over.set()
        if failure:
            self._end(failure)

    def _watch(self):
        """Returns the failure, or None when all ranks have ended."""
        self._heard = told = time.monotonic()
        while True:
            asked = False
            if self._channel.poll(_POLL_SECONDS):
                message = self._channel.receive() or {"kind": "lost"}
                self._heard = time.monotonic()
                if message["kind"] == "lost":
                    return self._describe_rank_0(
                        "is gone: it was killed, crashed, or left by os._exit."
                    )
                if message["kind"] == "farewell":
                    return None
                if message["kind"] == "failure":
                    return message["message"]
                if message["kind"] == "timeout":
                    self._timeout_seconds = message["seconds"]
                    told = 0.0  # Rank 0 waits for no longer than that now.
                asked = message["kind"] == "ask"
            self._report(asked)
            now = time.monotonic()
            if now - told > min(5.0, self._timeout_seconds / 4):
                self._channel.send(kind="alive")
                told = now
            silent = now - self._heard
            if silent > self._timeout_seconds:
                return self._describe_rank_0(
                    f"has not been heard of for {silent:.0f} s: it is stopped "
                    "or its machine cannot be reached."
                )

    def _report(self, asked):
        report = self._look(asked)
        # A rank that waits and computes may yet come; rank 0 has to hear when
        # it no longer computes.
        busy = report.status == "blocked" and report.busy
        state = report.status, report.open_calls, report.note, busy
        if asked or state != self._sent:
            self._channel.send(kind="report", **report.to_json())
            self._sent = state

    def _look(self, closely):
        report = self._observer.look(closely)
        report.note = self._note
        if self._has_ended:
            report.status = "ended"
        return report

    def _describe_rank_0(self, what):
        reports = {0: verdict.Report("gone"), self._rank: self._look(True)}
        return verdict.describe(f"the process of rank 0 {what}", reports)

    def _end(self, failure):
        errors.record_failure(failure)
        if not self._has_raised:
            self._announce()
        # It may block as long as the engine waits for a stopped rank.
        # TensorFlow logs what it is given several times.
        first_line = failure.splitlines()[0]
        threading.Thread(
            target=self._abort, args=(first_line,), daemon=True
        ).start()
        time.sleep(_GRACE_SECONDS)
        self._leave()

    def _announce(self):
        with self._announcing:
            if not self._is_announced:
                self._is_announced = True
                print(f"\n{errors.failure()}", file=sys.stderr, flush=True)

    def _leave(self):
        """Ends the process, whatever the main thread does."""
        for child in multiprocessing.active_children():
            child.terminate()
        flush = threading.Thread(target=_flush, daemon=True)
        flush.start()
        flush.join(1)
        os._exit(self._exit_code)

    # The main thread.

    def _inquire(self, error):
        """Lets rank 0 find out why a collective has failed here."""
        if self._is_mine() and not self._is_over.is_set():
            self._channel.send(kind="trouble", error=_core(error.message))
            self._wait(_EXPLAIN_SECONDS)

    def _wait(self, seconds):
        end = time.monotonic() + seconds
        while errors.failure() is None and time.monotonic() < end:
            if not self._thread.is_alive():
                return
            time.sleep(0.02)

    def _on_exception(self, kind, error, trace):
        if not self._is_mine():
            return self._next_hook(kind, error, trace)
        error = errors.explain(error)
        if isinstance(error, errors.CollectiveError) and errors.failure():
            self._announce()
            # The whole message has just been shown.
            first_line = str(error).splitlines()[0]
            error = errors.CollectiveError(first_line)
        else:
            self.report_exception(error)
        self._next_hook(type(error), error, trace)

    def _on_thread_exception(self, args):
        # Not the end of the program, but it may explain what follows.
        name = args.thread.name if args.thread else "a thread"
        self._note = f"{name} raised {args.exc_type.__name__}: {args.exc_value}"
        self._next_thread_hook(args)

    def _on_exit(self):
        if not self._is_mine():
            return
        if self._has_raised:
            # Rank 0 tells the others from a thread of this process.
            self._wait(3.0)
            self._leave()
        self._has_ended = True
        self._channel.send(
            kind="report", **verdict.Report("ended", note=self._note).to_json()
        )
        # Others that still compute need this rank's part of the engine, and
        # take its end for a failure.
        while self._thread.is_alive() and errors.failure() is None:
            time.sleep(0.02)
        if errors.failure() is not None:
            self._announce()
            self._leave()
        self._close()

    def _is_mine(self):
        return os.getpid() == self._pid  # else a child this one has forked


def _flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # closed, or None
    logging.shutdown()


def _core(message):
    """The line of an operation's error that is not about where it was made."""
    around = (
        *(" ", "\t", "Detected at", "Graph execution error"),
        *("Hint:", "Traceback (most recent"),
    )
    lines = [
        line.partition("[Op:")[0].strip()
        for line in message.splitlines()
        if not line.startswith(around)
    ]
    # The error itself comes last.
    return [message.strip(), *filter(None, lines)][-1][:500]


def _spell(error):
    if isinstance(error, SystemExit):
        return f"SystemExit, by sys.exit({error.code!r})"
    is_operations = isinstance(error, tf.errors.OpError)
    text = _core(error.message) if is_operations else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _exit_code(error):
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT  # as a shell has it
    return 1
