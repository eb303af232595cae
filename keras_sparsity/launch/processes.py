"""The processes of one launch: started, watched and ended together."""

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import time

from keras_sparsity.launch import _boot
from keras_sparsity.launch._boot import DUMP_LETTER, LIFELINE_VARIABLE, SIGNALS

# Ranks notice a lost one by themselves (`health/watch.py`) and report the
# collective they were waiting in; they get this long to do so.
LAST_WORDS_SECONDS = 5.0
# From the first signal to SIGKILL: all ranks end within 10 s of Ctrl-C.
GRACE_SECONDS = 7.0
# Until an ssh client ends after its remote process.
_CLIENT_SECONDS = 1.0
_POLL_SECONDS = 0.05

_LETTERS = {number: letter for letter, number in SIGNALS.items()}
SSH_FAILED = 255  # the ssh client's exit code

# TensorFlow 2.21 prints these in every process at any log level.
_BANNER = re.compile(r"WARNING: All log messages before absl|I0000 00:00:")


class RankProcess:
    """One rank's process.

    The launcher holds the writing end of a pipe, the lifeline, and the rank's
    guard (`_boot.py`) reads from it: a letter names a signal to raise (ssh
    forwards none); when the launcher ends, the pipe closes and the rank ends.

    Args:
        rank: Its number.
        command: List of arguments.
        environment: The whole environment.
        stdout: Path of the file for its output, or None to inherit ours.
        stderr: As `stdout`; the same path puts both in one file.
        remote_host: The host of an ssh client's remote process. The client's
            standard input then is the lifeline.
        greeting: Bytes to write on the lifeline first.
        inherit_stdin: Whether it reads our standard input.
    """

    def __init__(
        self,
        rank,
        command,
        environment,
        stdout=None,
        stderr=None,
        remote_host=None,
        greeting=b"",
        inherit_stdin=False,
    ):
        self.rank = rank
        self.log_path = stderr or stdout
        self.ended_seconds = None
        self.we_ended_it = False
        self._remote_host = remote_host
        reading, self._lifeline = os.pipe()
        with (
            contextlib.ExitStack() as unstarted,
            contextlib.ExitStack() as files,
        ):
            unstarted.callback(self.close_lifeline)
            files.callback(os.close, reading)
            out = files.enter_context(open(stdout, "ab")) if stdout else None
            err = files.enter_context(open(stderr, "ab")) if stderr else None
            if remote_host:
                stdin, pass_fds = reading, ()
            else:
                stdin = None if inherit_stdin else subprocess.DEVNULL
                pass_fds = (reading,)
                environment = {**environment, LIFELINE_VARIABLE: str(reading)}
            # In its own session, Ctrl-C reaches it only through the launcher,
            # once, and its child processes end with it.
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=stdin,
                stdout=out,
                stderr=err,
                pass_fds=pass_fds,
                start_new_session=True,
            )
            unstarted.pop_all()
        self._greet(greeting)

    @property
    def pid(self):
        return self._process.pid

    @property
    def returncode(self):
        """As in `subprocess`: negative for a signal."""
        return self._process.returncode

    @property
    def exit_code(self):
        """As in a shell: 128 and more for a signal."""
        code = self.returncode
        return 128 - code if code < 0 else code

    def poll(self):
        """The `returncode`, None while it runs."""
        code = self._process.poll()
        if code is not None and self.ended_seconds is None:
            self.ended_seconds = time.monotonic()
            self._signal_group(signal.SIGKILL)  # its child processes
        return code

    def send_signal(self, signal_number):
        """Sends a signal to the rank and to its child processes."""
        if self.poll() is not None:
            return
        if signal_number in (signal.SIGTERM, signal.SIGKILL):
            self.we_ended_it = True
        if self._remote_host:
            self._write(_LETTERS[signal_number])
            if signal_number == signal.SIGKILL:
                self.close_lifeline()
        else:
            self._signal_group(signal_number)

    def end_client(self):
        """Ends the process of a rank that was killed.

        The end of a remote rank normally closes the connection and with it
        the ssh client; this ends a client that hangs.
        """
        if self.poll() is None:
            self._signal_group(signal.SIGKILL)

    def end(self):
        """Ends it at once, also if it is stopped."""
        self.send_signal(signal.SIGKILL)
        self.wait()
        self.close_lifeline()

    def dump_stacks(self):
        """Lets the rank print its threads' stacks to stderr."""
        self._write(DUMP_LETTER)

    def close_lifeline(self):
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    def wait(self, timeout_seconds=None):
        return self._process.wait(timeout_seconds)

    def describe_end(self):
        """How it ended, in words."""
        code = self.returncode
        where = f" on {self._remote_host}" if self._remote_host else ""
        if code is None:
            return f"does not answer{where}"
        if self.we_ended_it:
            return f"was ended by the launcher{where}"
        if self._remote_host and code == SSH_FAILED:
            return (
                f"ended{where} without an exit code: it was killed, or ssh "
                "lost the connection"
            )
        if self._remote_host and code > 128:  # as in a shell
            code = 128 - code
        if code >= 0:
            return f"exited with code {code}{where}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = ""
        if -code == signal.SIGKILL:
            hint = " (by the system, if memory ran out: see dmesg)"
        return f"was killed by {name}{where}{hint}"

    def last_lines(self, count=20):
        """The last lines of its output file, if it has one."""
        return last_lines(self.log_path, count) if self.log_path else []

    def _signal_group(self, signal_number):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal_number)

    def _greet(self, message):
        # The pipe must hold all of it: its reader may not read yet.
        size_bytes = len(message) + 4096
        with contextlib.suppress(OSError):
            if size_bytes > fcntl.fcntl(self._lifeline, fcntl.F_GETPIPE_SZ):
                fcntl.fcntl(self._lifeline, fcntl.F_SETPIPE_SZ, size_bytes)
        self._write(message)

    def _write(self, message):
        if message and self._lifeline is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._lifeline, message)


def start_here(rank, arguments, variables, **files):
    """Starts a rank on this machine.

    Args:
        rank: Its number.
        arguments: See `_child.main`.
        variables: Its whole environment.
        **files: Further arguments of `RankProcess`.

    Returns:
        `RankProcess`.
    """
    command = [sys.executable, *python_flags(), _boot.__file__, *arguments]
    return RankProcess(rank, command, variables, **files)


def python_flags():
    """Those of this interpreter's flags that its ranks need."""
    return ["-P"] if _boot.is_path_safe() else []


class ProcessGroup:
    """The ranks of one launch; leaving the `with` block ends them all.

    Args:
        lost_path: Path of the file in which ranks write the number of one
            without which they go on (`health/watch.py`).
        on_lost: Function of such a rank's process, once, and of whether the
            others still run and go on, that returns a new process of the rank,
            or None.
    """

    def __init__(self, lost_path=None, on_lost=lambda process, goes_on: None):
        self.processes = []
        self._lost_path, self._on_lost = lost_path, on_lost
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
            and p not in self._lost
        ]
        # The loss of a rank raises an exception on the others, code 1. So a
        # signal (out of memory) or another code is the cause, whatever the
        # order of time.
        return sorted(
            ended,
            key=lambda p: (
                p.returncode >= 0,
                p.returncode == 1,
                p.ended_seconds,
            ),
        )

    def lost(self):
        """The ranks that failed, and without which the others went on."""
        return list(self._lost)

    def _look_for_lost(self):
        now, listed = time.monotonic(), self._listed()
        for process in list(self.processes):
            if process in self._again:
                # Nobody is to wait for it, and the list has its rank already.
                # Decided when it is known whether others' end ends all.
                is_open = self._stop_signals[:1] == [None]
                if process.poll() not in (None, 0) and not is_open:
                    self._again.remove(process)
                    if self._go_on() and not process.we_ended_it:
                        self._lose(process)
            elif process.rank in listed and process not in self._lost:
                since = self._listed_seconds.setdefault(process.rank, now)
                # One that raises needs a moment to end, a stopped one does not
                # end.
                is_over = now > since + LAST_WORDS_SECONDS
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

    def _listed(self):
        try:
            with open(self._lost_path) as file:
                return {int(line) for line in file if line.endswith("\n")}
        except (OSError, TypeError):
            return set()  # none yet, or no file

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
        deadline = time.monotonic() + _CLIENT_SECONDS
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
        seconds = _CLIENT_SECONDS if is_last else self._stage_seconds
        self._deadline = time.monotonic() + seconds

    def _end_clients(self):
        for process in self.running():
            process.end_client()


class Follower:
    """Copies additions to a file to a stream, at each call."""

    def __init__(self, path, stream):
        self._path = path
        self._stream = stream
        self._position = 0

    def __call__(self):
        with contextlib.suppress(FileNotFoundError):
            with open(self._path, "rb") as file:
                file.seek(self._position)
                added = file.read()
                if added:
                    self._position += len(added)
                    self._stream.write(added.decode(errors="replace"))
                    self._stream.flush()


def last_lines(path, count=20, start=0):
    """The last lines of a file, with progress bars as a terminal shows them."""
    window_bytes = 64 * 1024
    try:
        with open(path, "rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(start, size_bytes - window_bytes))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = [line.rstrip("\r").split("\r")[-1] for line in text.split("\n")]
    lines = [line.split("\b")[-1].rstrip() for line in lines]
    lines = [line for line in lines if line and not _BANNER.match(line)]
    return lines[-count:]
