"""The process of one rank, and the file of its output."""

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

_LETTERS = {number: letter for letter, number in SIGNALS.items()}
SSH_FAILED = 255  # the ssh client's exit code
# Until an ssh client ends after its remote process.
CLIENT_SECONDS = 1.0

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
        self.rank, self._remote_host = rank, remote_host
        self.log_path = stderr or stdout
        self.ended_seconds, self.we_ended_it = None, False
        reading, self._lifeline = os.pipe()
        with (
            contextlib.ExitStack() as unstarted,
            contextlib.ExitStack() as files,
        ):
            unstarted.callback(self.close_lifeline)
            files.callback(os.close, reading)
            out = files.enter_context(open(stdout, "ab")) if stdout else None
            err = files.enter_context(open(stderr, "ab")) if stderr else None
            stdin, pass_fds = reading, ()
            if not remote_host:
                stdin = None if inherit_stdin else subprocess.DEVNULL
                pass_fds = (reading,)
                environment = {**environment, LIFELINE_VARIABLE: str(reading)}
            # A session of its own: Ctrl-C comes from the launcher, once.
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
        """As in `subprocess`: negative for a signal, of another host too."""
        code = self._process.returncode
        is_remote_end = self._remote_host and code not in (None, SSH_FAILED)
        if is_remote_end and code > 128:  # as in a shell
            return 128 - code
        return code

    @property
    def exit_code(self):
        """As in a shell: 128 and more for a signal."""
        code = self.returncode
        return 128 - code if code < 0 else code

    def poll(self):
        """The `returncode`, None while it runs."""
        is_running = self._process.poll() is None
        if not is_running and self.ended_seconds is None:
            self.ended_seconds = time.monotonic()
            self._signal_group(signal.SIGKILL)  # its child processes
        return self.returncode

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
        try:
            self.wait(CLIENT_SECONDS)
        except subprocess.TimeoutExpired:
            self.end_client()  # of a machine that is lost
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
    """The `RankProcess` of a rank that is started on this machine.

    Args:
        arguments: See `_child.main`.
        variables: Its whole environment.
        **files: Further arguments of `RankProcess`.
    """
    command = [sys.executable, *python_flags(), _boot.__file__, *arguments]
    return RankProcess(rank, command, variables, **files)


def python_flags():
    """Those of this interpreter's flags that its ranks need."""
    return ["-P"] if _boot.is_path_safe() else []


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
