"""The processes of one launch: watched and ended together."""

import signal
import time

from keras_sparsity.launch.rank_process import CLIENT_SECONDS

# Ranks notice a lost one by themselves (`health/watch.py`) and report the
# collective they were waiting in; they get this long to do so.
LAST_WORDS_SECONDS = 5.0
# The watch ends a lost rank within ten seconds, whatever its program does.
LOST_SECONDS = 12.0
# From the first signal to SIGKILL: all ranks end within 10 s of Ctrl-C.
GRACE_SECONDS = 7.0
_POLL_SECONDS = 0.05


class ProcessGroup:
    """The ranks of one launch; leaving the `with` block ends them all.

    Args:
        listed: The set of ranks without which the others go on, which grows.
        on_lost: Function of such a rank's process, once, and of whether the
            others still run and go on, that returns a new process of the rank,
            or None.
        needs: Function of a rank: whether it fails if it is lost and has no
            new process.
    """

    def __init__(
        self,
        listed=frozenset(),
        on_lost=lambda process, goes_on: None,
        needs=lambda rank: False,
    ):
        self.processes = []
        self._listed, self._on_lost = listed, on_lost
        self._needs, self._missed = needs, []  # lost ones without new processes
        self._lost, self._listed_seconds = [], {}
        self._again, self._alone_since = [], None  # lost ranks' new processes
        self._deadline = None
        self._stop_signals = []
        self._is_for_failure = False  # whether it stops for a failure
        self._stage_seconds = GRACE_SECONDS

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.kill()

    def append(self, process):
        self.processes.append(process)

    def running(self):
        return [p for p in self.processes if p.poll() is None]

    def failed(self):
        """The ranks that ended with an error by themselves, the cause first."""
        ended = [
            p
            for p in self.processes
            if p.poll() not in (None, 0)
            and not p.we_ended_it
            and not self._is_spared(p)
        ]
        # The loss of a rank raises an exception on the others, code 1. So a
        # signal (out of memory) or another code is the cause, whatever the
        # order of time. But Horovod with groups of ranks aborts the others.
        aborted = [p for p in ended if p.returncode == -signal.SIGABRT]
        others = aborted if len(aborted) > 1 else []
        return sorted(
            ended,
            key=lambda p: (
                p in others,
                p.returncode >= 0,
                p.returncode == 1,
                p.ended_seconds,
            ),
        )

    def succeeded(self):
        """Whether each rank ended well, or the others went on without it."""
        return all(
            p.returncode == 0 or self._is_spared(p) for p in self.processes
        )

    def _is_spared(self, process):
        """Whether the others go on without it, or with its new process."""
        return process in self._lost and process not in self._missed

    def causes(self):
        """The ranks whose end has ended a run that failed, the first one first.

        A lost rank is one if the others were ended before they had said that
        they go on without it.
        """
        return self.failed() or self.lost()

    def lost(self):
        """The ranks that failed, and without which the others went on."""
        return list(self._lost)

    def _look_for_lost(self):
        now = time.monotonic()
        for process in list(self.processes):
            if process in self._again:
                # Nobody is to wait for it, and the list has its rank already.
                # Decided when it is known whether others' end ends all.
                is_open = self._stop_signals[:1] == [None]
                if process.poll() not in (None, 0) and not is_open:
                    self._again.remove(process)
                    if self._go_on() and not process.we_ended_it:
                        self._lose(process)
            elif process.rank in self._listed and process not in self._lost:
                since = self._listed_seconds.setdefault(process.rank, now)
                # One that raises needs a moment to end, a stopped one does not
                # end.
                is_over = now > since + LOST_SECONDS
                if process.poll() is not None or is_over:
                    self._lost.append(process)
                    self._lose(process)
        self._end_lost(now)
        is_waiting = self._is_for_failure and self._stop_signals[0] is None
        if is_waiting and not self.failed():
            self._stop_signals, self._deadline = [], None
            self._is_for_failure = False

    def _end_lost(self, now):
        """Ends those without which the others have gone on to their end."""
        running = self.running()
        if not running or self._are_needed():
            return
        self._alone_since = self._alone_since or now
        # One that has joined ends with the others.
        is_new = all(process in self._again for process in running)
        if not is_new or now > self._alone_since + LAST_WORDS_SECONDS:
            self.send_signal(signal.SIGKILL)

    def _are_needed(self):
        """Whether a process runs that is not lost."""
        return any(p not in self._lost for p in self.running())

    def _go_on(self):
        """Whether a process runs that is not lost, and nothing stops it."""
        is_stopped = self._stop_signals[:1] not in ([], [None])
        return self._are_needed() and not is_stopped

    def _lose(self, process):
        again = self._on_lost(process, self._go_on())
        if again:
            self.processes[self.processes.index(process)] = again
            self._lost.append(again)
            self._again.append(again)
        elif self._needs(process.rank):
            self._missed.append(process)

    def send_signal(self, signal_number):
        for process in self.running():
            process.send_signal(signal_number)

    def stop(self, first_signal=signal.SIGTERM):
        """Sends the first signal; `step` sends the next ones in time.

        Called again, it sends the next signal at once.
        """
        if not self._stop_signals:
            signals = list(dict.fromkeys([first_signal, signal.SIGTERM]))
            self._stop_signals = [*signals, signal.SIGKILL]
            self._stage_seconds = GRACE_SECONDS / len(signals)
        elif len(self._stop_signals) > 1:
            self._stop_signals.pop(0)
        self._send_stop()

    def stop_after(self, seconds):
        """Stops the ranks later, if they have not ended by themselves."""
        if not self._stop_signals:
            self._stop_signals = [None, signal.SIGTERM, signal.SIGKILL]
            self._stage_seconds = GRACE_SECONDS
            self._deadline = time.monotonic() + seconds
            self._is_for_failure = True

    def step(self):
        """Sends a signal that is due; called a few times per second."""
        if self._deadline and time.monotonic() > self._deadline:
            if self._stop_signals == [signal.SIGKILL]:
                self._end_clients()
            else:
                self._stop_signals.pop(0)
                self._send_stop()
        time.sleep(_POLL_SECONDS)

    def wait(self, on_poll=lambda: None):
        """Waits for all ranks; a failure of one ends the others."""
        while self.running():
            if self.failed():
                self.stop_after(LAST_WORDS_SECONDS)
            self._look_for_lost()
            self.step()
            on_poll()
        self._look_for_lost()
        on_poll()

    def dump_stacks(self, wait_seconds=1.0):
        for process in self.running():
            process.dump_stacks()
        time.sleep(wait_seconds)

    def kill(self):
        """Ends the running ranks at once."""
        self.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + CLIENT_SECONDS
        while self.running() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        self._end_clients()
        for process in self.processes:
            process.wait()
            process.poll()
            process.close_lifeline()

    def _send_stop(self):
        self.send_signal(self._stop_signals[0])
        is_last = self._stop_signals == [signal.SIGKILL]
        seconds = CLIENT_SECONDS if is_last else self._stage_seconds
        self._deadline = time.monotonic() + seconds

    def _end_clients(self):
        for process in self.running():
            process.end_client()
