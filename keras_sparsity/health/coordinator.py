"""A rank's thread, which collects all ranks' reports and declares failures."""

import dataclasses
import math
import queue
import threading
import time
from multiprocessing import connection

from keras_sparsity.health import verdict
from keras_sparsity.health.pauses import Pauses
from keras_sparsity.health.report import Report, to_lists
from keras_sparsity.health.returning import Returning
from keras_sparsity.health.stops import LastStep

_TICK_SECONDS = 0.25
# Time for the ranks' answers to `ask`. They take milliseconds, unless a rank
# holds Python's lock.
_ANSWER_SECONDS = 1.0
# A failed operation is rarely the cause. A rank that died or raised is, and
# rank 0 learns of it within this time.
_CAUSE_SECONDS = 2.0
# Ranks that leave `fit` together, by one error of all, do so within this time.
LEAVE_SECONDS = 3.0
# Within so long, or the timeout if it is longer, a new process must take a lost
# rank's place: TensorFlow's import takes up to a minute on a loaded machine.
_RETURN_SECONDS = 120.0
# Begins the message to a rank that is lost, which others do not get.
GO_ON = "the others go on without this"


class Coordinator:
    """Receives all ranks' messages, and answers.

    Messages from a rank: `report` (a `Report`), `raised` (the exception that
    ends its program), `leaving` (an exception ends its `fit`, perhaps not its
    program), `trouble` (a collective failed), `timeout` (a new one), `alive`,
    `spare` (ranks without which the others go on), `joined` (of a lost rank's
    new process: it takes part), `stop` (it wants to end a `fit`), `bound` (its
    step, see `Stops`). Messages to all ranks: `ask` (report now, also
    how often some calls have ended), `timeout` (a new one), `failure`,
    `farewell`, `alive`, `without` (a rank that is lost), `back` (an awaited
    rank takes part again), `hold` and `last` (see `Stops.hear`). To those that
    leave: `all_leave` (none of them is lost).

    Args:
        channels: dict from rank to `Channel`.
        timeout_seconds: How long a rank may be silent, or let others wait.
        root: This process's rank, None if it has none.
        returning: `Returning`, of ranks that are awaited if they are lost.
        on_change: Function of a rank without which the others go on or wait,
            or that has come back, and of whether it is lost; it returns at
            once.
    """

    def __init__(
        self,
        channels,
        timeout_seconds,
        root,
        returning=None,
        on_change=lambda rank, is_lost: None,
    ):
        self._channels, self._root = channels, root
        self._timeout_seconds = timeout_seconds
        self._reports = {rank: Report() for rank in channels}
        self._received = dict.fromkeys(channels, time.monotonic())
        self._heard = dict.fromkeys(channels, time.monotonic())
        self._asked, self._asked_calls = None, set()
        self._told_alive = time.monotonic()
        self._problem = None
        self._deadline = None
        self._is_cause = False
        self._done = False
        self._spare, self._lost = set(), set()
        self._leaving = {}  # from a rank to its problem, and since when
        self._lost_at = -math.inf
        self._returning, self._last_step = returning or Returning(), LastStep()
        self._on_change = on_change
        self._admitted = queue.SimpleQueue()
        self._new = set()  # of lost ranks' new processes, that have not joined
        self._thread = threading.Thread(
            target=self._run, name="keras_sparsity coordinator", daemon=True
        )

    def start(self):
        self._thread.start()

    def admit(self, rank, channel):
        """Takes a lost rank's new process; called in another thread."""
        self._admitted.put((rank, channel))

    def retire(self):
        """Decides nothing from now on: another process does."""
        self._done = True

    def join(self):
        """Waits until all ranks have closed their ends, or been informed."""
        self._thread.join()

    def _run(self):
        ranks = {channel: rank for rank, channel in self._channels.items()}
        pauses = Pauses()
        while ranks and not self._done:
            ranks = self._with_admitted(ranks)
            ready = connection.wait(list(ranks), _TICK_SECONDS)
            if pause := pauses.passed():
                self._heard = {r: at + pause for r, at in self._heard.items()}
            for channel in ready:
                rank, message = ranks[channel], channel.receive()
                if message is None:
                    del ranks[channel]
                if rank in self._lost:
                    continue
                self._heard[rank] = time.monotonic()
                if message is None:
                    self._hear_end(rank)
                else:
                    getattr(self, f"_hear_{message.pop('kind')}")(
                        rank, **message
                    )
            if not self._done:
                self._judge()

    def _with_admitted(self, ranks):
        """dict from `Channel` to rank, with new processes of lost ranks."""
        while not self._admitted.empty():
            rank, channel = self._admitted.get()
            if rank not in self._lost:
                channel.close()
                continue
            self._lost.remove(rank)
            if not self._returning.awaits(rank):
                self._spare.add(rank)
            self._new.add(rank)
            self._channels[rank], self._reports[rank] = channel, Report()
            self._received[rank] = self._heard[rank] = time.monotonic()
            # Its earlier process may be stopped, and end later.
            ranks = {c: r for c, r in ranks.items() if r != rank}
            ranks[channel] = rank
        return ranks

    def _hear_alive(self, rank):
        pass

    def _hear_timeout(self, rank, seconds):
        if seconds == self._timeout_seconds:
            return
        self._timeout_seconds = seconds
        self._tell(kind="timeout", seconds=seconds)
        # The ranks were alive at the rate of the earlier timeout.
        self._heard = dict.fromkeys(self._heard, time.monotonic())

    def _hear_report(self, rank, **fields):
        self._received[rank] = time.monotonic()
        if self._reports[rank].status == "gone":
            return
        note = self._reports[rank].note
        self._reports[rank] = Report.from_json(fields)
        self._reports[rank].note = self._reports[rank].note or note
        self._end_if_all_have()

    def _end_if_all_have(self):
        awaited = self._taking_part(self._reports).values()
        if all(report.status == "ended" for report in awaited):
            self._done = True
            self._tell_the_last(kind="farewell")

    def _taking_part(self, reports):
        """The reports of ranks for which the others may wait."""
        return {r: each for r, each in reports.items() if r not in self._new}

    def _hear_joined(self, rank):
        self._new.discard(rank)
        if self._returning.take(rank):
            self._lost_at = time.monotonic()  # Others have waited until now.
            self._tell(kind="back", rank=rank)
            self._on_change(rank, False)

    def _hear_spare(self, rank, ranks):
        self._spare.update(set(ranks) - self._lost)

    def _hear_stop(self, rank, fit):
        if self._last_step.begin(fit):
            self._tell(kind="hold", fit=fit)

    def _hear_bound(self, rank, fit, step):
        last = self._last_step.found(rank, fit, step, self._channels)
        if last is not None:
            self._tell(kind="last", fit=fit, step=last)

    def _hear_raised(self, rank, error):
        if self._goes_on_without(rank, f"rank {rank} raised {error}"):
            return
        self._reports[rank].status = "gone"
        self._reports[rank].note = f"raised {error.splitlines()[0]}"
        self._suspect(f"rank {rank} raised {error}")

    def _hear_leaving(self, rank, error):
        problem = f"rank {rank} left `fit` by {error}"
        self._leaving[rank] = problem, time.monotonic()

    def _hear_trouble(self, rank, error):
        if rank in self._spare:
            return  # It raises, if it does not go on.
        self._reports[rank].note = f"failed: {error}"
        self._suspect(
            f"a collective failed on rank {rank}: {error}", is_cause=False
        )

    def _hear_end(self, rank):
        if self._reports[rank].status == "gone":
            return
        problem = (
            f"the process of rank {rank} is gone: it was killed, crashed, or "
            "left by os._exit."
        )
        if not self._outlasts(rank, problem):
            self._reports[rank].status = "gone"
            self._suspect(problem)

    def _goes_on_without(self, rank, problem):
        """Whether the others go on without a rank; then tells all of them."""
        if rank not in self._spare or not self._spare - self._new - {rank}:
            return False
        self._spare.remove(rank)
        self._leaving.pop(rank, None)
        self._lose(rank, problem)
        self._tell_lost(rank, problem)
        self._end_if_all_have()
        return True

    def _tell_lost(self, rank, problem):
        self._tell(kind="without", rank=rank, problem=problem)
        self._on_change(rank, True)

    def _outlasts(self, rank, problem):
        """Whether the death of a rank does not end the others.

        They go on without it, or wait for its new process.
        """
        if self._goes_on_without(rank, problem):
            return True
        if self._returning.awaits(rank):  # A new process has died.
            self._lose(rank, problem)
            return True
        if not self._returning.lose(rank):
            return False
        self._lose(rank, problem)
        self._tell_lost(rank, problem)
        return True

    def _lose(self, rank, problem):
        self._new.discard(rank)
        self._lost.add(rank)
        self._lost_at = time.monotonic()
        del self._reports[rank], self._heard[rank]
        self._channels[rank].send(
            kind="failure",
            message=f"keras_sparsity: {GO_ON}: {problem}",
        )
        del self._channels[rank]

    def _suspect(self, problem, is_cause=True):
        """Declares the problem later, when all ranks have reported."""
        if self._problem is None:
            self._ask()
        elif self._is_cause or not is_cause:
            return
        self._problem = problem
        self._is_cause = is_cause
        wait = _ANSWER_SECONDS if is_cause else _CAUSE_SECONDS
        self._asked = time.monotonic()
        self._deadline = self._asked + wait

    def _judge(self):
        now = time.monotonic()
        if self._problem is not None:
            answered = self._is_cause and all(
                self._received[rank] > self._asked
                for rank, report in self._reports.items()
                if report.status != "gone"
            )
            if answered or now > self._deadline:
                self._declare(self._problem)
            return
        self._judge_leaving(now)
        if self._problem is not None:
            return
        if now > self._told_alive + self._alive_seconds():
            self._tell(kind="alive")
            self._told_alive = now
        silent = now - min(self._heard.values())
        if silent > self._timeout_seconds:
            rank = min(self._heard, key=self._heard.get)
            problem = (
                f"the process of rank {rank} has not been heard of for "
                f"{silent:.0f} s: it is stopped or its machine cannot be "
                "reached."
            )
            if not self._outlasts(rank, problem):
                self._reports[rank].note = f"silent for {silent:.0f} s"
                self._suspect(problem)
            return
        waited = self._returning.waited()
        if waited is None:
            self._judge_calls(now)
        elif waited[1] > max(_RETURN_SECONDS, self._timeout_seconds):
            self._is_cause = True
            self._declare(
                f"rank {waited[0]} is lost, and no new process has taken its "
                f"place within {waited[1]:.0f} s."
            )

    def _judge_leaving(self, now):
        """Ranks that leave are lost, or end all, unless all leave."""
        workers = (self._spare or self._reports.keys()) - self._new
        if not workers - self._leaving.keys():
            for rank in self._leaving:
                self._channels[rank].send(kind="all_leave")
            self._leaving.clear()
        for rank, (problem, since) in list(self._leaving.items()):
            is_late = now > since + LEAVE_SECONDS
            if is_late and not self._goes_on_without(rank, problem):
                self._suspect(problem)

    def _judge_calls(self, now):
        """Declares a deadlock that persists after a report of all ranks."""
        aged = self._taking_part(self._aged(now))
        timeout_seconds = self._timeout_seconds
        if now - self._lost_at < timeout_seconds:
            timeout_seconds = math.inf  # The others may have waited for it.
        if not verdict.find_deadlock(aged, timeout_seconds):
            self._asked = None
            return
        if self._asked is None:
            self._asked = now
            self._ask()
            return
        # A rank that computes may hold Python's lock for longer.
        waited_for = [
            rank
            for rank, report in self._taking_part(self._reports).items()
            if report.status in ("blocked", "ended") or now < self._asked + 1
        ]
        if all(map(self._has_answered, waited_for)):
            problem = verdict.find_deadlock(
                self._taking_part(self._reports), timeout_seconds
            )
            if problem:
                self._is_cause = True
                self._declare(problem)
            self._asked = None

    def _ask(self):
        """Asks all ranks for a report, with the ends of the open calls."""
        self._asked_calls = {
            call.without_shape()
            for report in self._reports.values()
            for call in report.open_calls
        }
        self._tell(kind="ask", calls=to_lists(self._asked_calls))

    def _has_answered(self, rank):
        """Whether a rank's report came since, and is no earlier one."""
        told = {call for call, _ in self._reports[rank].left}
        return self._received[rank] > self._asked and told >= self._asked_calls

    def _aged(self, now):
        """The reports as if they had arrived now."""
        return {
            rank: dataclasses.replace(
                report,
                stalled_seconds=report.stalled_seconds
                + now
                - self._received[rank],
            )
            for rank, report in self._reports.items()
        }

    def _declare(self, problem):
        self._done = True
        if not self._is_cause:
            reports = self._taking_part(self._reports)
            problem = verdict.find_mismatch(reports) or problem
        message = verdict.describe(problem, self._reports)
        self._tell_the_last(kind="failure", message=message)

    def _tell_the_last(self, **message):
        # Its own rank comes last: this thread ends with the process.
        for rank in sorted(self._channels, key=lambda r: r == self._root):
            self._channels[rank].send(**message)

    def _tell(self, **message):
        for channel in self._channels.values():
            channel.send(**message)

    def _alive_seconds(self):
        return min(5.0, self._timeout_seconds / 4)
