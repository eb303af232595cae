"""The thread by which a rank reports its state, and ends on a failure."""

import atexit
import logging
import os
import sys
import threading
import time

from keras_sparsity.health import ending, errors, launcher, verdict
from keras_sparsity.health.channel import NO_RANK
from keras_sparsity.health.coordinator import GO_ON, LEAVE_SECONDS
from keras_sparsity.health.observer import Observer
from keras_sparsity.health.pauses import Pauses
from keras_sparsity.health.report import Report, from_lists
from keras_sparsity.health.stops import Stops
from keras_sparsity.machines import door

_POLL_SECONDS = 0.5
# Time for the program to end by itself after a failure.
_GRACE_SECONDS = 10.0
# The launcher names the rank that ended first: its error ends the others, which
# wait for so long. Without it another one was named in 9 of 12 runs of 3 ranks.
_AFTER_CAUSE_SECONDS = 0.5
# Rank 0 explains a failed operation within about 3 s.
_EXPLAIN_SECONDS = 6.0


class RankWatch:
    """Reports this rank's state, and ends its process on a failure.

    Args:
        root: The rank that decides; None if it is no rank.
        channel: The `Channel` to it.
        stop: `Engine.abort` and `Engine.close`.
        is_new: Whether this process takes part only when it has `joined`.

    Attributes:
        coordinator: The `Coordinator`, if this process has it.
    """

    def __init__(
        self, rank, root, channel, journal, stop, timeout_seconds, is_new=False
    ):
        self._is_new = is_new
        self.rank, self._root = rank, root
        self._on_change, self._lost = (lambda rank, is_lost: None), []
        # The errors by which this rank leaves, see `leave`. The others would
        # train on until they wait for it, at the end of an epoch.
        self._leaves_by = SystemExit if root == 0 else ()
        self._all_leave = threading.Event()
        self._left_by = None  # the error by which this rank has left
        self._channel, self.stops = channel, Stops(self._send)
        self._earlier = []  # that are not closed, as their end is a rank's
        self.coordinator = None
        self._abort, self._close = stop
        self.timeout_seconds = timeout_seconds
        self._journal, self._observer = journal, Observer(journal)
        self._pid = os.getpid()
        self._sent = None
        self._asked_calls = ()  # that other ranks were in, when last asked
        self._heard = time.monotonic()
        self._has_ended = self._has_raised = False
        self._exit_code, self._note = 1, ""
        self._is_over = threading.Event()
        self._announcing, self._is_announced = threading.Lock(), False
        self._thread = threading.Thread(
            target=self._run, name="keras_sparsity watch", daemon=True
        )

    def start(self):
        self._next_hook = sys.excepthook
        sys.excepthook = self._on_exception
        self._next_thread_hook = threading.excepthook
        threading.excepthook = self._on_thread_exception
        atexit.register(self._on_exit)
        errors.set_sources(self._journal, self._inquire)
        self._thread.start()

    def move(self, channel):
        """From now on, a process decides that is no rank, and has no other."""
        self._earlier.append(self._channel)
        self._heard = time.monotonic()
        self._channel, self._root, self.coordinator = channel, None, None

    def _send(self, **message):
        return self._channel.send(**message)

    def set_timeout(self, seconds):
        # Rank 0 was alive at the rate of the earlier timeout.
        self._heard = time.monotonic()
        # At once, as rank 0 may be stopped before it informs the others.
        self.timeout_seconds = seconds
        self._send(kind="timeout", seconds=seconds)

    def joined(self):
        self._is_new = False
        self._send(kind="joined")

    def go_on_without(self, ranks, on_change):
        self._on_change = on_change
        self._leaves_by = BaseException if self.rank in ranks else ()
        self._send(kind="spare", ranks=list(ranks))

    def report_exception(self, error):
        if self._is_mine() and not self._is_over.is_set():
            self._has_raised = True
            self._exit_code = ending.exit_code(error)
            self._send(kind="raised", error=errors.spelled(error))

    def leave(self, error):
        is_mine = self._is_mine() and not self._is_over.is_set()
        if not (isinstance(error, self._leaves_by) and is_mine):
            return
        self._exit_code = ending.exit_code(error)
        self._all_leave.clear()
        self._send(kind="leaving", error=errors.spelled(error))
        self._wait(2 * LEAVE_SECONDS, self._all_leave.is_set)
        if GO_ON in (errors.failure() or ""):
            self._left_by = error
        else:  # of all ranks
            self._exit_code = 1

    # The thread.

    def _run(self):
        try:
            failure = self._watch()
        except Exception:
            if not sys.is_finalizing():
                logging.getLogger(__name__).exception(
                    "The watch of rank %d failed; if another rank fails, this "
                    "one may now hang.",
                    self.rank,
                )
            return
        finally:
            self._is_over.set()
        if failure:
            self._end(failure)

    def _watch(self):
        """The failure, or None when all ranks have ended."""
        self._heard = told = time.monotonic()
        pauses = Pauses()
        while True:
            asked, channel = False, self._channel
            is_heard = channel.poll(_POLL_SECONDS)
            self._heard += pauses.passed()
            if channel is not self._channel:
                continue  # It decides no more.
            if is_heard:
                message = channel.receive() or {"kind": "lost"}
                self._heard = time.monotonic()
                if message["kind"] == "farewell":
                    if self._is_new:
                        self._leave(0)
                    return None
                if message["kind"] in ("failure", "lost"):
                    return message.get("message") or self._describe_root(
                        "is gone: it was killed, crashed, or left by os._exit."
                    )
                if message["kind"] == "timeout":
                    told = 0.0  # Rank 0 may expect a sign of life at once.
                asked = message["kind"] == "ask"
                self._hear(**message)
            self._report(asked)
            now = time.monotonic()
            if now - told > min(5.0, self.timeout_seconds / 4):
                self._send(kind="alive")
                told = now
            silent = now - self._heard
            if silent > self.timeout_seconds:
                return self._describe_root(
                    f"has not been heard of for {silent:.0f} s: it is stopped "
                    "or its machine cannot be reached."
                )

    def _hear(self, kind, **message):
        if kind == "timeout":
            self.timeout_seconds = message["seconds"]
        if kind == "without":
            self._go_on(message["rank"], message["problem"])
        if kind == "back":
            self._on_change(message["rank"], False)
        if kind == "all_leave":
            self._all_leave.set()
        if kind == "ask":
            self._asked_calls = from_lists(message["calls"])
        self.stops.hear(kind, **message)

    def _report(self, asked):
        report = self._look(asked)
        # A blocked rank that computes may still move; rank 0 must learn when
        # it stops computing.
        busy = report.status == "blocked" and report.busy
        channel = self._channel
        state = channel, report.status, report.open_calls, report.note, busy
        if asked or state != self._sent:
            channel.send(kind="report", **report.to_json())
            self._sent = state

    def _look(self, closely):
        # Of these calls each report tells: it takes the place of the answer.
        report = self._observer.look(closely, self._asked_calls)
        report.note = self._note or report.note
        if self._has_ended:
            report.status = "ended"
        return report

    def _describe_root(self, problem):
        reports, name = {self.rank: self._look(True)}, NO_RANK.lower()
        if self._root is not None:
            reports = {self._root: Report("gone"), **reports}
            name = f"the process of rank {self._root}"
        return verdict.describe(f"{name} {problem}", reports)

    def _go_on(self, rank, problem):
        self._lost.append(rank)
        # The launcher says it.
        if self.rank == self._root:
            is_said = launcher.tell(self.rank, lost=rank)
        else:
            is_said = door.launcher() is not None
        if not is_said:
            logging.getLogger(__name__).warning("%s The others go on.", problem)
        self._on_change(rank, True)

    def _end(self, failure):
        errors.record_failure(failure)
        if not self._has_raised:
            self._announce()
        # In a thread, as it may block while the engine waits for a stopped
        # rank. One line, as TensorFlow logs it several times.
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

    def _leave(self, exit_code=None):
        ending.end(self._exit_code if exit_code is None else exit_code)

    # The main thread.

    def _inquire(self, error):
        """Lets rank 0 find the reason for a failed collective."""
        if self._is_mine() and not self._is_over.is_set():
            self._send(kind="trouble", error=errors.core(error.message))
            self._wait(_EXPLAIN_SECONDS)

    def _wait(self, seconds, is_over=lambda: False):
        end = time.monotonic() + seconds
        while errors.failure() is None and time.monotonic() < end:
            if is_over() or not self._thread.is_alive():
                return
            time.sleep(0.02)

    def _on_exception(self, kind, error, trace):
        if not self._is_mine():
            return self._next_hook(kind, error, trace)
        if error is not self._left_by:  # which is the cause
            error = errors.explain(error)
        if isinstance(error, errors.CollectiveError) and errors.failure():
            self._announce()
            # The whole message has already been shown.
            first_line = str(error).splitlines()[0]
            error = errors.CollectiveError(first_line)
        else:
            self.report_exception(error)
        self._next_hook(type(error), error, trace)

    def _on_thread_exception(self, args):
        # The program goes on, but this may be the reason of a later failure.
        name = args.thread.name if args.thread else "a thread"
        self._note = f"{name} raised {args.exc_type.__name__}: {args.exc_value}"
        self._next_thread_hook(args)

    def _on_exit(self):
        if not self._is_mine():
            return
        if self._has_raised:
            # On rank 0 a thread of this process informs the others.
            self._wait(3.0)
            self._leave()
        self._has_ended = True
        self._send(kind="report", **Report("ended", note=self._note).to_json())
        # Ranks that still compute need this rank's engine, and would take its
        # end for a failure.
        while self._thread.is_alive() and errors.failure() is None:
            time.sleep(0.02)
        if errors.failure() is not None:
            self._announce()
            time.sleep(_AFTER_CAUSE_SECONDS)
            self._leave()
        if self.coordinator is not None:
            self.coordinator.join()  # It may still be telling the others.
        if self._lost:  # for which the engine would wait
            self._leave(0)
        self._close()

    def _is_mine(self):
        return os.getpid() == self._pid  # not a forked child
