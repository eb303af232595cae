"""Numbers of batches that a worker takes, the next one while it computes."""

import math
import time

# Of a step, that a number must take to be asked for early. A worker that asks
# early holds one more batch, for which others wait at the end of an epoch.
_LEAST_SHARE = 0.1


class Taking:
    """Takes the numbers of a training's batches, one after another.

    The server that hands them out may be far, or its links busy. Then the
    number of the next batch is asked for while a step computes: once the push
    of the batch before has ended, as a worker holds two numbers at most, see
    `Batches`.

    Args:
        training: the `Training`.
    """

    def __init__(self, training):
        self._training = training
        self.begin_epoch()

    def begin_epoch(self):
        self._early = None  # Future of what `next` is to return.
        self._seconds = 0.0  # for which the last answer was awaited
        # When the step before began: the first may take any time.
        self._asked_at = -math.inf

    def next(self):
        """As `Store.take`: a number, and the set of those that are held."""
        now = time.monotonic()
        step_seconds, self._asked_at = now - self._asked_at, now
        early, self._early = self._early, None
        if early is None:
            number, held = self._take(self._training.record())
        else:
            number, held = early.result()
            # It is told with the one after the next.
            self._training.note_step()
        pushing = self._training.worker.pushing
        is_long = self._seconds > _LEAST_SHARE * step_seconds
        if number >= 0 and pushing.overlaps and is_long:
            self._early = pushing.behind(self._take_early)
        return number, held

    def settle(self):
        """Takes no more: the others get a number that was asked for early."""
        early, self._early = self._early, None
        if early is not None:
            early.result()

    def _take_early(self, staleness):
        return self._take(self._training.record_of_noted(staleness))

    def _take(self, record):
        begun = time.monotonic()
        taken = self._training.store.take(record)
        self._seconds = time.monotonic() - begun
        return taken
