"""Seconds of a training step, of the slowest rank."""

import math
import statistics
import time

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity.callbacks.cycles import Cycles

# A median is known well enough when it has come from so many measurements,
# over so many seconds, with so small a standard error. Other work on the
# machine comes in bursts: that a second's steps agree says something, that a
# tenth of a second's do says little.
_FEWEST = 10
_LEAST_SECONDS = 1.0
_RELATIVE_ERROR = 0.01
# Ranks compare after this many executions, and each time that they have grown
# by half.
_FIRST_LOOK = 3


class StepEnd(keras.callbacks.Callback):
    """Notes when a step has ended, before other callbacks see that it has.

    Attributes:
        seconds: the clock's (`time.perf_counter`) at the end of the last step.
    """

    def __init__(self):
        super().__init__()
        self.seconds = 0.0

    def on_train_batch_end(self, batch, logs=None):
        # Keras has waited for the logs' values, so the device is done, too.
        for value in (logs or {}).values():
            np.asarray(value)
        self.seconds = time.perf_counter()


class StepSeconds:
    """The median time of a step, each of them as long as its slowest rank's.

    Args:
        num_steps: to measure at most.
        num_dropped: steps that are left out at first. The first execution
            always is: it traces.
        max_seconds: after which the known steps are enough, by the first
            rank's clock.
        cycle_steps: steps that make one update: whole cycles count.
        last_seconds: after which it ends without a whole cycle, too.

    Attributes:
        is_late: whether it has ended without one.
    """

    def __init__(
        self,
        collectives,
        num_steps,
        num_dropped,
        max_seconds,
        cycle_steps=1,
        last_seconds=math.inf,
    ):
        self._collectives = collectives
        self._num_steps = num_steps
        self._num_left_to_drop = max(1, num_dropped)
        self._max_seconds, self._last_seconds = max_seconds, last_seconds
        self._cycles = Cycles(cycle_steps)
        self._start = time.monotonic()
        self._own = []
        self._num_measured = self._num_executions = 0
        self._look_at, self._is_over = _FIRST_LOOK, False
        self.is_late = False

    def add(self, seconds, num_steps):
        """Takes the time of an execution of some steps on this rank.

        Returns:
            `(seconds, error_seconds)` of a step once it is known, the same on
            all ranks; None before.
        """
        if self._num_left_to_drop > 0:
            self._num_left_to_drop -= num_steps
            return None
        self._num_executions += 1
        of_cycle = self._cycles.add(seconds, num_steps)
        if of_cycle is not None:
            seconds, num_steps = of_cycle
            self._own.append(seconds / num_steps)
            self._num_measured += num_steps
        # Also within a long cycle, which may take more time than there is.
        if self._num_executions >= self._look_at:
            self._look_at = math.ceil(1.5 * self._num_executions)
        elif of_cycle is None or not (self._is_over or self._is_last):
            return None
        return self._looked()

    @property
    def _is_last(self):
        """Whether all steps are measured, some of many steps each."""
        is_enough = self._num_measured >= self._num_steps
        return is_enough and len(self._own) >= _FIRST_LOOK

    def _looked(self):
        """Compares the ranks; the result of `add`."""
        own = [[time.monotonic() - self._start, *self._own]]
        ranks = self._collectives.all_gather(
            tf.constant(own, tf.float64), name="partition_search/seconds"
        ).numpy()
        elapsed = ranks[0, 0]
        self._is_over = elapsed >= self._max_seconds
        if not self._own:
            self.is_late = elapsed >= self._last_seconds
            return None
        # Plain Python from here on: the same bits on every processor.
        slowest = ranks[:, 1:].max(axis=0).tolist()
        median, error = median_and_error(slowest)
        steps_of_each = self._num_measured / len(slowest)
        is_known = (
            len(slowest) >= _FEWEST
            and steps_of_each * sum(slowest) >= _LEAST_SECONDS
            and error <= _RELATIVE_ERROR * median
        )
        if self._is_last or is_known or self._is_over:
            return median, error
        return None


def median_and_error(values):
    """The median of some numbers, and its standard error.

    From the median of the distances to it, so that single outliers count in
    neither.

    Example:

    >>> median, error = median_and_error([1.0, 2.0, 3.0, 4.0, 500.0])
    >>> median, round(error, 3)
    (3.0, 0.831)
    """
    median = statistics.median(values)
    distance = statistics.median([abs(value - median) for value in values])
    # 1.4826 makes a standard deviation of it, 1.2533 that of a median, both of
    # a normal distribution.
    return median, 1.2533 * 1.4826 * distance / math.sqrt(len(values))
