"""Ends all ranks, with the reason, when the ranks cannot go on.

The engines do not notice that ranks wait in different collectives, and their
errors after the death of a rank do not give its reason. So each rank has a
thread that reads its journal twice a second and, if no call begins or ends,
reports its open calls to rank 0, or to the first dedicated server. There
`coordinator.py` decides, by the rules of `verdict.py`, and informs all ranks.
"""

import atexit
import logging
import os
import sys
import threading
import time

from keras_sparsity.health import channel as channels
from keras_sparsity.health import ending, errors, launcher, verdict
from keras_sparsity.health.coordinator import GO_ON, LEAVE_SECONDS, Coordinator
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

_watch = _coordinator = None
_alone = Stops(lambda **message: False)
_one_machine = None  # whether the ranks that started together are on one


def start(collectives, journal, abort, close, timeout_seconds):
    """Starts to watch this rank. A collective call, once per process.

    Args:
        abort: `Engine.abort`, called from a thread.
        close: `Engine.close`, called at exit when all ranks have ended.
        timeout_seconds: How long a living rank may keep others waiting.
    """
    global _coordinator, _one_machine
    # Training may go on without a worker, but not without a server.
    root = collectives.num_workers % collectives.size
    channel, all_channels, _one_machine = channels.connect(
        collectives.rank, collectives.size, collectives.gather_objects, root
    )
    if all_channels:
        _coordinator = Coordinator(all_channels, timeout_seconds, root)
        _coordinator.start()
    stop = abort, close
    _begin(collectives.rank, root, channel, journal, stop, timeout_seconds)


def _begin(*arguments):
    global _watch
    _watch = _Watch(*arguments)
    _watch.start()


def open_door(size):
    """On the rank that decides: lets new processes of lost ranks `join`.

    Returns:
        Facts for them, of the types of JSON.
    """
    server, hosts = channels.listen(_one_machine, size, _watch.rank)
    facts = channels.Door(server, hosts, _coordinator.admit).facts
    return {**facts, "timeout": _watch.timeout_seconds}


def join(rank, root, facts, journal):
    """Starts to watch a rank that was lost, in its new process.

    Args:
        root: The rank that decides.
        facts: Those of `open_door`.
    """
    channel = channels.call(facts, rank, f"Rank {root}")
    stop = (lambda message: None), (lambda: None)
    _begin(rank, root, channel, journal, stop, facts["timeout"], True)


def joined():
    """This rank, which was lost, takes part again."""
    if _watch is not None:
        _watch.joined()


def set_timeout(seconds):
    """Changes the timeout; every rank calls it with the same value."""
    if _watch is not None:
        _watch.set_timeout(seconds)


def go_on_without(ranks, on_change):
    """From now on, the loss of one of some ranks does not end the others.

    A rank that is lost is told so, and ends. If all of them are, all ranks end.

    Args:
        on_change: Function of a rank that is lost, or that was awaited and is
            back, and of whether it is lost; called in a thread.
    """
    if _watch is not None:
        _watch.go_on_without(ranks, on_change)


def returning():
    """On the rank that decides: its `Returning`."""
    return _coordinator.returning


def report_exception(error):
    """Informs all ranks that `error` ends this rank's program.

    For callers that catch an error that would otherwise end the process.
    """
    if _watch is not None:
        _watch.report_exception(error)


def leave(error):
    """An error ends this rank's `fit`, and perhaps not its program.

    Returns when it is decided whether the others go on without this rank (see
    `go_on_without`). Then it is lost, and ends. If all leave together, none is.
    Without dedicated servers a rank that leaves alone by `sys.exit` ends all.
    """
    if _watch is not None:
        _watch.leave(error)


def stops():
    """The `Stops` of this rank."""
    return _alone if _watch is None else _watch.stops


class _Watch:
    """Reports this rank's state, and ends its process on a failure."""

    def __init__(
        self, rank, root, channel, journal, stop, timeout_seconds, is_new=False
    ):
        self._is_new = is_new  # and does not take part yet
        self.rank, self._root = rank, root
        self._on_change, self._lost = (lambda rank, is_lost: None), []
        # The errors by which this rank leaves, see `leave`. The others would
        # train on until they wait for it, at the end of an epoch.
        self._leaves_by = () if root else SystemExit
        self._all_leave = threading.Event()
        self._left_by = None  # the error by which this rank has left
        self._channel, self.stops = channel, Stops(channel.send)
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

    def set_timeout(self, seconds):
        # Rank 0 was alive at the rate of the earlier timeout.
        self._heard = time.monotonic()
        # At once, as rank 0 may be stopped before it informs the others.
        self.timeout_seconds = seconds
        self._channel.send(kind="timeout", seconds=seconds)

    def joined(self):
        self._is_new = False
        self._channel.send(kind="joined")

    def go_on_without(self, ranks, on_change):
        self._on_change = on_change
        self._leaves_by = BaseException if self.rank in ranks else ()
        self._channel.send(kind="spare", ranks=list(ranks))

    def report_exception(self, error):
        if self._is_mine() and not self._is_over.is_set():
            self._has_raised = True
            self._exit_code = ending.exit_code(error)
            self._channel.send(kind="raised", error=errors.spelled(error))

    def leave(self, error):
        is_mine = self._is_mine() and not self._is_over.is_set()
        if not (isinstance(error, self._leaves_by) and is_mine):
            return
        self._exit_code = ending.exit_code(error)
        self._all_leave.clear()
        self._channel.send(kind="leaving", error=errors.spelled(error))
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
            asked, is_heard = False, self._channel.poll(_POLL_SECONDS)
            self._heard += pauses.passed()
            if is_heard:
                message = self._channel.receive() or {"kind": "lost"}
                self._heard = time.monotonic()
                if message["kind"] == "lost":
                    return self._describe_root(
                        "is gone: it was killed, crashed, or left by os._exit."
                    )
                if message["kind"] == "farewell":
                    if self._is_new:
                        self._leave(0)
                    return None
                if message["kind"] == "failure":
                    return message["message"]
                if message["kind"] == "timeout":
                    self.timeout_seconds = message["seconds"]
                    told = 0.0  # Rank 0 may expect a sign of life at once.
                if message["kind"] == "without":
                    self._go_on(message["rank"], message["problem"])
                if message["kind"] == "back":
                    self._on_change(message["rank"], False)
                if message["kind"] == "all_leave":
                    self._all_leave.set()
                self.stops.hear(**message)
                asked = message["kind"] == "ask"
                if asked:
                    self._asked_calls = from_lists(message["calls"])
            self._report(asked)
            now = time.monotonic()
            if now - told > min(5.0, self.timeout_seconds / 4):
                self._channel.send(kind="alive")
                told = now
            silent = now - self._heard
            if silent > self.timeout_seconds:
                return self._describe_root(
                    f"has not been heard of for {silent:.0f} s: it is stopped "
                    "or its machine cannot be reached."
                )

    def _report(self, asked):
        report = self._look(asked)
        # A blocked rank that computes may still move; rank 0 must learn when
        # it stops computing.
        busy = report.status == "blocked" and report.busy
        state = report.status, report.open_calls, report.note, busy
        if asked or state != self._sent:
            self._channel.send(kind="report", **report.to_json())
            self._sent = state

    def _look(self, closely):
        # Of these calls each report tells: it takes the place of the answer.
        report = self._observer.look(closely, self._asked_calls)
        report.note = self._note
        if self._has_ended:
            report.status = "ended"
        return report

    def _describe_root(self, problem):
        reports = {self._root: Report("gone"), self.rank: self._look(True)}
        return verdict.describe(
            f"the process of rank {self._root} {problem}", reports
        )

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
            self._channel.send(kind="trouble", error=errors.core(error.message))
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
        self._channel.send(
            kind="report", **Report("ended", note=self._note).to_json()
        )
        # Ranks that still compute need this rank's engine, and would take its
        # end for a failure.
        while self._thread.is_alive() and errors.failure() is None:
            time.sleep(0.02)
        if errors.failure() is not None:
            self._announce()
            time.sleep(_AFTER_CAUSE_SECONDS)
            self._leave()
        if _coordinator is not None:
            _coordinator.join()  # It may still be telling the others.
        if self._lost:  # for which the engine would wait
            self._leave(0)
        self._close()

    def _is_mine(self):
        return os.getpid() == self._pid  # not a forked child
