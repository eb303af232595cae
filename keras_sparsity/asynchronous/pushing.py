"""A worker's push that travels while it computes the next gradient."""

import collections
import threading
from concurrent import futures

# A push lets the next step's requests leave first, for so long at most.
_HELD_SECONDS = 0.03


class Pushing:
    """Runs the pushes of a training one after another.

    All calls but the pushes themselves are of the thread that trains.

    Args:
        overlaps: whether a push runs in a thread of its own.
        holds: whether one that does begins behind `let_go`. The next step's
            requests, which are short, would else wait for it on the links.

    Attributes:
        overlaps: as above.
        staleness: dict from the number of updates since a pull to the number of
            the pushes of this epoch that have ended.
    """

    def __init__(self, overlaps, holds):
        self.overlaps, self._holds = overlaps, overlaps and holds
        self._may_leave = threading.Event()
        self._thread = futures.ThreadPoolExecutor(1, "keras_sparsity-push")
        self._under_way = self._batch = self._version = None
        self.staleness = collections.Counter()

    def begin(self, push, batch, version, *values):
        """Begins a push, see `Store.pusher`, when the one before has ended."""
        self.wait()
        self._batch, self._version = batch, version
        self._may_leave.clear()
        call = push, batch, version, *values
        self._under_way = self._thread.submit(self._pushed, *call)
        if not self.overlaps:
            self.wait()

    def _pushed(self, push, *values):
        if self._holds:
            self._may_leave.wait(_HELD_SECONDS)
        return push(*values)

    def let_go(self):
        """The next step's requests leave now, from any thread."""
        self._may_leave.set()

    def has_ended(self, batch):
        """Whether a batch's push is not under way; raises the error of one.

        That of an earlier batch is awaited: a step may push nothing.
        """
        if self._under_way is not None:
            if self._batch != batch or self._under_way.done():
                self.wait()
        return self._under_way is None

    def behind(self, call):
        """Runs a call when the push that is under way has ended.

        Args:
            call: function of `staleness`, as it is then.

        Returns:
            The `Future` of its result.
        """
        counted, version = self.staleness.copy(), self._version
        under_way = self._under_way

        def run():
            if under_way is not None:
                counted[int(under_way.result() - version)] += 1
            return call(counted)

        return self._thread.submit(run)

    def wait(self):
        """Waits for the push that is under way; raises its error."""
        self.let_go()
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            self.staleness[int(under_way.result() - self._version)] += 1

    def close(self, raises):
        """Ends the thread, after the push that is under way.

        With `raises` its error is raised: not where another one is under way.
        """
        self.let_go()
        self._thread.shutdown()
        if raises:
            self.wait()
