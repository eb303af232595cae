"""Times by which the search for placements compares them."""

import collections
import time

import numpy as np

from keras_sparsity.callbacks.cycles import Cycles
from keras_sparsity.collectives import speeds
from keras_sparsity.collectives.speeds import Speed

# A network of 1,000 Mbit/s, of whose bytes a machine sends and receives at
# once, and 1 ms for a message: AllReduce is one, AllGatherv two, a pull and a
# push three. Two processes on one machine measured 1.3 to 1.6 ms, 1.3 to 2.0
# and 2.1 to 3.8, and 3e-11 to 9e-11 seconds for an updated byte.
REFERENCE = {
    "allreduce": Speed(0.001, 4e-9),
    "allgather": Speed(0.002, 4e-9),
    "ps": Speed(0.003, 4e-9),
    "update": Speed(0.0, 5e-11),
}
# Tracing the step of a small model anew takes a second or two.
_REFERENCE_TRACE_SECONDS = 2.0
# Steps that are remembered.
_MOST_TIMES = 256


def of(placements):
    """The times that the architecture of a strategy asks for."""
    if placements.measures_times:
        return Measured(placements.communicator)
    return Counted()


class Counted:
    """Those of a reference network: no clock is read, so that runs repeat.

    Methods and attributes as of `Measured`, without a look back.
    """

    trace_seconds = _REFERENCE_TRACE_SECONDS
    looks_back = False

    def speeds(self, num_bytes):
        return REFERENCE

    def forget(self):
        pass

    def begin(self):
        pass

    def end(self, num_steps):
        pass


class Measured:
    """Those of this cluster and of this training.

    Attributes:
        trace_seconds: of tracing the step anew.
        looks_back: whether the times of steps tell if a move was worth it.
    """

    looks_back = True

    def __init__(self, communicator):
        self._communicator = communicator
        self._speeds = None
        # Of the slowest trace so far; the same on all ranks after a decision.
        self.trace_seconds = 0.0

    def speeds(self, num_bytes):
        """dict from each path to its `Speed`, see `speeds.measure`."""
        if self._speeds is None:
            self._speeds = speeds.measure(self._communicator, num_bytes)
        return self._speeds

    def forget(self):
        """Forgets the steps so far: the next one is traced."""
        # A long training has many steps between decisions: the last count.
        self._executions = collections.deque(maxlen=_MOST_TIMES)

    def begin(self):
        """Notes that steps begin."""
        self._start = time.perf_counter()

    def end(self, num_steps):
        """Notes that some steps have ended."""
        seconds = time.perf_counter() - self._start
        if not self._executions:  # with the tracing
            self.trace_seconds = max(self.trace_seconds, seconds)
        self._executions.append((seconds, num_steps))

    def step_seconds(self, cycle_steps=1):
        """Seconds of a step since the last move, on the slowest rank.

        Args:
            cycle_steps: steps that make one update: whole cycles count, if
                there has been one.
        """
        executions = list(self._executions)
        executions = executions[2:] or executions  # without the tracing
        cycles = Cycles(cycle_steps)
        whole = [cycles.add(*execution) for execution in executions]
        whole = [each for each in whole if each] or [
            tuple(map(sum, zip(*executions, strict=True)))
        ]
        # The lower quartile: other work on a machine only adds time.
        seconds = [seconds / number for seconds, number in whole]
        of_ranks = self._communicator.gather_objects(
            float(np.quantile(seconds, 0.25)), name="auto_architecture/seconds"
        )
        return max(of_ranks)
