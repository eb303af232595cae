"""Lost ranks whose new processes the others wait for."""

import threading
import time


class Returning:
    """Which ranks may be lost and come back, and which are awaited.

    Its methods may be called from several threads.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._ranks, self._since = frozenset(), {}

    def allow(self, ranks):
        """From now on, the others wait for the new process of a lost one."""
        with self._lock:
            self._ranks = frozenset(ranks)

    def end(self):
        """From now on, none may be lost; False, and no change, if one is."""
        with self._lock:
            if self._since:
                return False
            self._ranks = frozenset()
            return True

    def lose(self, rank):
        """Whether a rank that is lost is awaited."""
        with self._lock:
            is_awaited = rank in self._ranks
            if is_awaited:
                self._since[rank] = time.monotonic()
            return is_awaited

    def awaits(self, rank):
        with self._lock:
            return rank in self._since

    def take(self, rank):
        """A rank has come back; whether it was awaited."""
        with self._lock:
            return self._since.pop(rank, None) is not None

    def waited(self):
        """`(rank, seconds)` of the longest wait; None without one."""
        with self._lock:
            if not self._since:
                return None
            rank = min(self._since, key=self._since.get)
            return rank, time.monotonic() - self._since[rank]
