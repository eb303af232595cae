"""The process that keeps the facts by which the ranks of a training go on.

Where the launcher starts lost ranks anew, any rank may die, and the facts about
those that go on must be elsewhere: the ranks' messages, clocks and numbers of
batches, the watch over the ranks, the `Registry`. So the first dedicated server
starts this process on its machine. It runs no program of the user and has no
variables; without it all ranks end. It ends when they have. (In ps-lite, the
parameter server of MXNet, it has the same name.)
"""

import contextlib
import json
import logging
import os
import queue
import select
import stat
import subprocess
import sys
import threading
import time
from multiprocessing import connection

from keras_sparsity.asynchronous.cluster import Cluster
from keras_sparsity.asynchronous.registry import Registry
from keras_sparsity.health import channel as channels
from keras_sparsity.health import launcher
from keras_sparsity.health.coordinator import Coordinator

# From its last message to its end, which ranks await for ten seconds at most.
_LINGER_SECONDS = 15.0
_LOOK_SECONDS = 0.1
_CALLS = (
    "begin_meeting",
    "add",
    "remove",
    "begin_epoch",
    "begin_returns",
    "end_returns",
)


class Scheduler:
    """Starts the process, which imports TensorFlow meanwhile."""

    def __init__(self):
        # Of a session of its own: it outlives the process that starts it.
        self._process = subprocess.Popen(
            [sys.executable, "-c", _program()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
            start_new_session=True,
        )

    def begin(self, addresses, collectives, watch_facts):
        """Has it listen, when it has begun.

        Args:
            addresses: as for `Cluster`.
            watch_facts: `watch.facts()`.
        """
        told = {
            "addresses": addresses,
            "rank": collectives.rank,
            "num_workers": collectives.num_workers,
            "num_servers": collectives.num_servers,
            **watch_facts,
        }
        # The input stays open as long as this process lives.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{json.dumps(told)}\n".encode())
            self._process.stdin.flush()

    def facts(self, seconds):
        """How processes reach its watch; None if it has not begun so soon.

        Raises:
            RuntimeError: If it has ended.
        """
        out = self._process.stdout
        if not select.select([out], [], [], seconds)[0]:
            return None
        line = out.readline()
        if not line:
            self._process.communicate()
            raise RuntimeError(
                f"{channels.NO_RANK}, which a dedicated server starts, ended "
                f"with code {self._process.returncode}. Its own error says why."
            )
        return json.loads(line)


def _program():
    """A program that finds the modules that this process finds."""
    return (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from {__name__} import main; main()"
    )


class SchedulerRegistry:
    """The scheduler's `Registry`, for the first dedicated server.

    Args:
        facts: how processes reach the scheduler.
        size: the number of ranks.
    """

    def __init__(self, facts, size):
        self._channel = channels.call(facts, size, channels.NO_RANK)

    def change(self, rank, is_lost):
        """The scheduler, which decides who is lost, knows it already."""

    def __getattr__(self, name):
        if name not in _CALLS:
            raise AttributeError(name)

        def call(*values):
            self._channel.send(call=name, values=values)
            reply = self._channel.receive() or {"error": "it is gone"}
            if "error" in reply:
                raise RuntimeError(
                    f"{channels.NO_RANK} failed: {reply['error']}."
                )
            return reply["value"]

        return call


def main():
    """The program."""
    facts = json.loads(sys.stdin.readline() or sys.exit())
    out, sys.stdout = sys.stdout, sys.stderr
    size = facts["num_workers"] + facts["num_servers"]
    cluster = Cluster(
        facts["addresses"],
        size,
        facts["num_workers"],
        facts["num_servers"],
        True,
        lambda message: None,  # the server beside it has said it
    )
    registry = Registry(cluster)
    admission = _Admission(registry, size)
    listening = channels.listen(facts["one_machine"], size, facts["rank"])
    door = channels.Door(*listening, admission)
    told = {**door.facts, "timeout": facts["timeout"]}
    print(json.dumps(told), file=out, flush=True)
    _close_pipes()
    ranks = admission.ranks()
    admission.coordinator = coordinator = Coordinator(
        ranks,
        facts["timeout"],
        root=None,
        returning=registry.returning,
        on_change=_changing(cluster, registry),
    )
    coordinator.start()
    coordinator.join()
    _await_ends(ranks.values())
    os._exit(0)  # TensorFlow cannot stop its server.


def _close_pipes():
    """Lets the server's end be seen: by ssh, when all have closed its pipes."""
    with open(os.devnull, "w") as nowhere:
        for number in (1, 2):
            if stat.S_ISFIFO(os.fstat(number).st_mode):
                os.dup2(nowhere.fileno(), number)


class _Admission:
    """Takes the connections of ranks, and those by which `Registry` is called.

    Args:
        size: the number of ranks, and the number that the latter have.

    Attributes:
        coordinator: gets new processes of lost ranks.
    """

    def __init__(self, registry, size):
        self._registry, self._size = registry, size
        self._arrived, self.coordinator = queue.SimpleQueue(), None

    def __call__(self, rank, channel):
        if rank == self._size:
            told = self._registry, channel
            threading.Thread(target=_answer, args=told, daemon=True).start()
        elif self.coordinator is None:
            self._arrived.put((rank, channel))
        else:
            self.coordinator.admit(rank, channel)

    def ranks(self):
        """dict from each rank to its `Channel`, once all have connected."""
        ranks = {}
        while len(ranks) < self._size:
            try:
                rank, channel = self._arrived.get(timeout=_LOOK_SECONDS)
                ranks[rank] = channel
            except queue.Empty:
                # Until then, the end of the server beside it ends it.
                if select.select([sys.stdin], [], [], 0)[0]:
                    os._exit(1)
        return ranks


def _answer(registry, channel):
    while message := channel.receive():
        try:
            call = getattr(registry, message["call"])
            reply = {"value": call(*message["values"])}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        channel.send(**reply)


def _changing(cluster, registry):
    """A function that notes changes, on which threads then act."""
    # It may wait for a server that stands still, which is lost later.
    change = _in_turn(registry.change)

    def tell(rank, is_lost):
        if is_lost:
            launcher.tell(cluster.size, lost=rank)
        cluster.change(rank, is_lost)
        change(rank, is_lost)

    return _in_turn(tell)


def _in_turn(act):
    """A function that notes its arguments; a thread calls `act` with them."""
    calls = queue.SimpleQueue()

    def run():
        try:
            while True:
                act(*calls.get())
        except Exception:
            logging.getLogger(__name__).exception("The scheduler failed.")
            os._exit(1)  # Others would wait for a rank that is lost.

    threading.Thread(target=run, daemon=True).start()
    return lambda *values: calls.put(values)


def _await_ends(ranks):
    """Waits until ranks have ended: a message that they have not read goes."""
    ranks, end = set(ranks), time.monotonic() + _LINGER_SECONDS
    while ranks and time.monotonic() < end:
        for channel in connection.wait(list(ranks), _LOOK_SECONDS):
            if channel.receive() is None:
                ranks.remove(channel)
