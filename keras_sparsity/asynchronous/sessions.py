"""Sessions whose calls outlast the death of a server."""

import threading
import time

import tensorflow as tf

from keras_sparsity._tf.tf_sessions import function_of
from keras_sparsity.health import errors

# A call may fail so long before its process learns of a server's death.
_TOLD_SECONDS = 6.0
# TensorFlow tries once a second to reach a server that it could not reach.
_SETTLE_SECONDS = 5.0
_LOOK_SECONDS = 0.05


class Outages:
    """Which servers are lost, and awaited.

    Args:
        are_possible: whether a new process may take a lost server's place.

    Attributes:
        number: of the servers that have come back.
    """

    def __init__(self, are_possible):
        self._are_possible = are_possible
        self._lock = threading.Lock()
        self._away, self._ended_at = set(), None
        self.number = 0

    def change(self, rank, is_lost):
        """A server is lost, or has come back."""
        with self._lock:
            if is_lost:
                self._away.add(rank)
                return
            self._away.discard(rank)
            self._ended_at = time.monotonic()
            self.number += 1

    def outlast(self, number, waits):
        """Whether a call that failed is to be made again; once it may be.

        Args:
            number: the attribute, when its session was made.
            waits: whether to wait for a server that is lost.
        """
        if not self._are_possible:
            return False
        begun = time.monotonic()
        while errors.failure() is None:
            time.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            with self._lock:
                if not self._away:
                    is_old, ended = number < self.number, self._ended_at
                    if is_old or (ended and now < ended + _SETTLE_SECONDS):
                        return True
                    if now > begun + _TOLD_SECONDS:
                        return False
            if not waits:
                return False
        return False


class LastingSession:
    """Calls of a graph's operations, which are made again after an outage.

    So a call may have been made, or begun, more than once. Those that wait at a
    living server go on: earlier sessions remain open.

    Args:
        cluster: `Cluster`.
    """

    def __init__(self, cluster, graph):
        self._cluster, self._graph = cluster, graph
        self._outages = cluster.outages
        self._lock = threading.Lock()
        self._sessions = [(self._outages.number, cluster.session(graph))]

    def function_of(self, feeds, fetches, targets=()):
        """As `tf_sessions.function_of`.

        The function also takes `again`, called before another attempt, and
        `waits`, see `Outages.outlast`.
        """
        made = {}

        def run(*values, again=lambda: None, waits=True):
            while True:
                number, session = self._sessions[-1]
                if number not in made:
                    made[number] = function_of(session, feeds, fetches, targets)
                try:
                    return made[number](*values)
                except tf.errors.OpError:
                    if not self._outages.outlast(number, waits):
                        raise
                self._renew()
                again()

        return run

    def _renew(self):
        with self._lock:
            number = self._outages.number
            if self._sessions[-1][0] < number:
                session = self._cluster.session(self._graph)
                self._sessions.append((number, session))

    def close(self):
        for _, session in self._sessions:
            session.close()
