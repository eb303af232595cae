"""A worker's push that travels while it computes the next gradient."""

import collections
from concurrent import futures


class Pushing:
    """Runs the pushes of a training one after another.

    All calls but the pushes themselves are of the thread that trains.

    Args:
        overlaps: whether a push runs in a thread of its own.

    Attributes:
        staleness: dict from the number of updates since a pull to the number of
            the pushes of this epoch that have ended.
    """

    def __init__(self, overlaps):
        self._overlaps = overlaps
        self._thread = futures.ThreadPoolExecutor(1, "keras_sparsity-push")
        self._under_way = self._batch = self._version = None
        self.staleness = collections.Counter()

    def begin(self, push, batch, version, *values):
        """Begins a push, see `Store.pusher`, when the one before has ended."""
        self.wait()
        self._batch, self._version = batch, version
        call = push, batch, version, *values
        self._under_way = self._thread.submit(*call)
        if not self._overlaps:
            self.wait()

    def has_ended(self, batch):
        """Whether a batch's push is not under way; raises the error of one.

        That of an earlier batch is awaited: a step may push nothing.
        """
        if self._under_way is not None:
            if self._batch != batch or self._under_way.done():
                self.wait()
        return self._under_way is None

    def wait(self):
        """Waits for the push that is under way; raises its error."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            self.staleness[int(under_way.result() - self._version)] += 1

    def close(self, raises):
        """Ends the thread, after the push that is under way.

        With `raises` its error is raised: not where another one is under way.
        """
        self._thread.shutdown()
        if raises:
            self.wait()
