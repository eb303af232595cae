"""Worker processes that stay alive over many tests.

Importing TensorFlow and bringing an engine up costs seconds per process, a
call to processes that wait costs milliseconds. A worker blocks on its socket
between calls.
"""

import contextlib
import dataclasses
import gc
import importlib
import os
import pickle
import secrets
import subprocess
import tempfile
import time
import traceback
from multiprocessing import connection

from keras_sparsity import collectives
from keras_sparsity.launch.functions import Job
from keras_sparsity.launch.rank_process import last_lines
from tests import forked

_START_TIMEOUT_SECONDS = 90
_LAST_WORDS_SECONDS = 5
# Time for a rank to print its stacks, unless it holds Python's lock.
_DUMP_SECONDS = 5
# Of Python's faulthandler, which tells all threads, the newest first.
_CRASHED = "Current thread 0x"


class ClusterError(AssertionError):
    """A call failed on a rank; holds every rank's traceback or last lines."""


@dataclasses.dataclass
class _Reply:
    """What a worker made of a call.

    Args:
        kind: `"done"`, `"raised"` or `"hung up"`.
        result: The function's result, or the traceback.
        is_usable: Whether the worker can be called again.
    """

    kind: str
    result: object = None
    is_usable: bool = False


class Cluster:
    """Processes of one engine that run functions on all ranks at once.

    They start at the first `run`. When some hang, die or find a failure between
    them, all are ended, and started anew at the next one; an exception that
    every rank raises leaves them.

    Args:
        num_processes: How many; without the servers.
        engine: `"local"`, `"native"` or `"horovod"`.
        machines: The number of machines that they believe to be on.
        env: Further environment variables.
        num_servers: The number of dedicated servers, the last ranks.
    """

    def __init__(
        self, num_processes, engine, machines=1, env=None, num_servers=0
    ):
        self.num_processes = num_processes + num_servers
        self.num_servers = num_servers
        self.engine = engine
        self.machines = machines
        self._env = env
        self._job = None
        self._connections = []

    @property
    def is_running(self):
        return self._job is not None

    def run(self, function, *args, timeout=200):
        """Calls `function(*args)` on every rank.

        Args:
            function: A function at the top level of a module.
            *args: Its arguments, to be pickled.
            timeout: Seconds after which the cluster is ended.

        Returns:
            List of the results, by rank.

        Raises:
            ClusterError: If it raises on a rank, a rank dies, or the time is
                over.
        """
        if self._job is None:
            self._start()
        message = pickle.dumps(
            (function.__module__, function.__qualname__, args)
        )
        logs = [p.log_path for p in self._job.processes.processes]
        log_starts = [os.path.getsize(path) for path in logs]
        replies = {}
        try:
            for channel in self._connections:
                with contextlib.suppress(ConnectionError):
                    channel.send_bytes(message)
            problem = self._collect(replies, timeout)
        except BaseException:  # Ctrl-C: the workers are in mid-call.
            self._clear()
            raise
        if problem is None:
            return [replies[rank].result for rank in self._ranks]
        usable = [reply.is_usable for reply in replies.values()]
        if len(usable) == self.num_processes and all(usable):
            ends = [None] * self.num_processes
        else:
            ends = self._end(replies)
        tails = [
            _last_words(path, start)
            for path, start in zip(logs, log_starts, strict=True)
        ]
        if ends[0] is not None:
            self._clear()
        where = f"{function.__module__}.{function.__qualname__}"
        raise ClusterError(
            f"{where} on {self.num_processes} processes, engine "
            f"{self.engine}: {problem}\n"
            + "\n".join(
                self._describe(rank, replies.get(rank), ends[rank], tails[rank])
                for rank in self._ranks
            )
        )

    def stop(self):
        """Ends the processes."""
        for channel in self._connections:
            with contextlib.suppress(OSError):
                channel.send_bytes(b"")
        if self._job is not None:
            deadline = time.monotonic() + 10
            while self._job.processes.running() and time.monotonic() < deadline:
                time.sleep(0.02)
        self._clear()

    @property
    def _ranks(self):
        return range(self.num_processes)

    def _collect(self, replies, timeout):
        """Fills `replies`; returns why it ended early, None if all is well."""
        deadline = time.monotonic() + timeout
        failed = False
        while len(replies) < self.num_processes:
            left = deadline - time.monotonic()
            if left <= 0:
                return (
                    "the others did not end"
                    if failed
                    else (f"not done within {timeout} seconds")
                )
            waiting = [
                self._connections[r] for r in self._ranks if r not in replies
            ]
            for channel in connection.wait(waiting, min(left, 1.0)):
                rank = self._connections.index(channel)
                try:
                    replies[rank] = pickle.loads(channel.recv_bytes())
                except (EOFError, ConnectionError):
                    replies[rank] = _Reply("hung up")
                if replies[rank].kind != "done" and not failed:
                    failed = True
                    # The others may wait for that rank for ever.
                    deadline = min(
                        deadline, time.monotonic() + _LAST_WORDS_SECONDS
                    )
        return "failed" if failed else None

    def _describe(self, rank, reply, end, tail):
        if reply and reply.kind == "done":
            return f"--- rank {rank} was done"
        if reply and reply.kind == "raised":
            what = f"raised\n{reply.result}"
        else:
            what = end
        printed = ["It printed:", *tail] if tail else []
        return "\n".join([f"--- rank {rank} {what}", *printed])

    def _start(self):
        key = secrets.token_hex(16)
        with (
            tempfile.TemporaryDirectory(prefix="cluster-") as folder,
            connection.Listener(
                os.path.join(folder, "socket"),
                backlog=self.num_processes,
                authkey=key.encode(),
            ) as listener,
        ):
            with forked.ranks():
                self._job = Job(
                    serve,
                    self.num_processes - self.num_servers,
                    self.engine,
                    args=(listener.address, key),
                    machines=self.machines,
                    env=self._env,
                    num_servers=self.num_servers,
                )
            try:
                self._connections = self._accept(listener)
            except BaseException:
                self._clear()
                raise

    def _accept(self, listener):
        channels = {}
        deadline = time.monotonic() + _START_TIMEOUT_SECONDS
        # Listener.accept has no timeout of its own.
        waitable = listener._listener._socket
        while len(channels) < self.num_processes:
            if self._job.processes.failed():
                self._job.processes.wait()
                raise self._job.failure()
            if time.monotonic() > deadline:
                raise self._job.timeout_error(
                    _START_TIMEOUT_SECONDS, " while starting"
                )
            if connection.wait([waitable], 0.1):
                channel = listener.accept()
                channels[channel.recv()] = channel
        return [channels[rank] for rank in self._ranks]

    def _end(self, replies):
        """Ends the processes after a failure; says what each was doing."""
        processes = self._job.processes.processes
        hanging = [
            p for p in processes if p.poll() is None and p.rank not in replies
        ]
        for process in hanging:
            process.dump_stacks()
        deadline = time.monotonic() + _DUMP_SECONDS
        while not all(map(_has_told, hanging)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in processes:
            reply = replies.get(process.rank)
            if reply and reply.kind == "hung up":
                # It hung up, so it is ending; how, is worth a moment.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(3)
        self._job.processes.kill()
        return [
            "was still running" if p in hanging else p.describe_end()
            for p in processes
        ]

    def _clear(self):
        for channel in self._connections:
            channel.close()
        self._connections = []
        if self._job is not None:
            self._job.__exit__()
            self._job = None


def _has_told(process):
    """Whether a rank has printed the stack of its main thread."""
    lines = last_lines(process.log_path, 1000)
    return any(line.startswith("MainThread is at:") for line in lines)


def _last_words(path, start):
    """A rank's last lines; a crash's own thread may stand far before them."""
    lines = last_lines(path, 1000, start)
    crashed = [i for i, line in enumerate(lines) if line.startswith(_CRASHED)]
    thread = lines[crashed[0] :][:20] if crashed else []
    return [*thread, *lines[-60:]]


def serve(address, key):
    """A worker's main loop: calls what it is sent."""
    channel = connection.Client(address, "AF_UNIX", authkey=key.encode())
    channel.send(collectives.current().rank)
    # What TensorFlow's import has left is never garbage: looking through it
    # takes 0.2 s, at each reset and now and then while a function is traced.
    gc.collect()
    gc.freeze()
    while message := channel.recv_bytes():
        _reset()
        try:
            module, qualname, args = pickle.loads(message)
            function = importlib.import_module(module)
            for name in qualname.split("."):
                function = getattr(function, name)
            reply = pickle.dumps(_Reply("done", function(*args)))
        except Exception:
            is_usable = collectives.failure() is None
            text = traceback.format_exc()
            reply = pickle.dumps(_Reply("raised", text, is_usable))
        channel.send_bytes(reply)


def _reset():
    """Makes a call independent of what ran before in the process."""
    import keras
    from tensorflow.python.framework import ops

    # `tf.custom_gradient` registers a function for each call that is traced,
    # for ever, and with it the whole graph. Looking through those of all tests
    # before took a third of the processor time of each later one.
    registered = ops._gradient_registry._registry
    for name in [n for n in registered if n.startswith("CustomGradient-")]:
        del registered[name]
    keras.backend.clear_session()  # It collects garbage, too.
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")
    # The same on every rank, as the launcher leaves it; clear_session also
    # forgets Keras's seed.
    keras.utils.set_random_seed(0)
