"""The steps of a training after which a checkpoint is due, or may be made."""

import math
import time

import tensorflow as tf


def saves_within(model):
    """Whether a model may be saved within an epoch: no gradients wait."""
    return getattr(model.distribute_strategy, "synchronous", True)


class SaveTimes:
    """Counts steps and seconds since the last checkpoint.

    Args:
        every_steps, every_seconds: as of `ShardedCheckpoint`.
    """

    def __init__(self, every_steps, every_seconds):
        self._every_steps, self._every_seconds = every_steps, every_seconds
        self.restart()

    def restart(self):
        """Counts from here."""
        self._num_steps, self._look_after = 0, 1
        self._time = time.monotonic()

    def add_steps(self, number):
        self._num_steps += number

    def is_due(self, collectives):
        """Whether to save now, the same on all ranks of `collectives`."""
        if self._every_steps and self._num_steps >= self._every_steps:
            return True
        if not self._every_seconds or self._num_steps < self._look_after:
            return False
        # Rank 0's clock decides. So as not to ask it in each step, it tells
        # when to ask again: half of the way that is left, at this speed.
        elapsed = max(time.monotonic() - self._time, 1e-3)
        left = self._every_seconds - elapsed
        steps_left = math.ceil(left / elapsed * self._num_steps / 2)
        (wait,) = collectives.broadcast(
            [tf.constant(min(max(0, steps_left), 1 << 30), tf.int64)],
            name="checkpoint/clock",
        )
        self._look_after = self._num_steps + int(wait)
        return self._look_after == self._num_steps
