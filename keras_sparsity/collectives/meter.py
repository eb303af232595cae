"""How long collectives take and what they send, counted inside the step.

Nothing is counted unless `Journal.measures` was set when the step was traced:
each call then costs a few operations more.
"""

import contextlib
import dataclasses
import threading

import numpy as np
import tensorflow as tf

from keras_sparsity import compat
from keras_sparsity.own_variable import OwnVariable

_tracing = threading.local()


@dataclasses.dataclass(frozen=True)
class Totals:
    """Of one rank: the sum of two is that of both.

    Attributes:
        calls: how often.
        seconds: from the time at which the inputs are there to that at which
            the outputs are, waiting for other ranks included.
        sent_bytes, received_bytes: what the engine hands to the network for
            other ranks, and takes from it.
    """

    calls: float = 0.0
    seconds: float = 0.0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0

    def __add__(self, other):
        return Totals(*np.add(self.to_list(), other.to_list()).tolist())

    def __sub__(self, other):
        return Totals(*np.subtract(self.to_list(), other.to_list()).tolist())

    def to_list(self):
        return list(dataclasses.astuple(self))


class Meter:
    """The totals of one place in one traced function."""

    def __init__(self):
        # All in one, which one operation adds to.
        self._totals = OwnVariable(np.zeros(4), tf.float64)

    def measured(self, run):
        """Runs `run()`, once its control dependencies are there.

        Returns:
            What it returns: any structure of tensors.
        """
        begin = compat.timestamp()
        counted = _tracing.counted = []
        try:
            outputs = run()
        finally:
            _tracing.counted = None
        with tf.control_dependencies(tf.nest.flatten(outputs)):
            self._add(begin, counted)
        return outputs

    @contextlib.contextmanager
    def around(self, inputs):
        """Measures all that is traced inside, from when `inputs` are there."""
        graph = tf.compat.v1.get_default_graph()
        with tf.control_dependencies(inputs):
            begin = compat.timestamp()
        num_before = len(graph.get_operations())
        yield
        with tf.control_dependencies(graph.get_operations()[num_before:]):
            self._add(begin, [])

    def _add(self, begin, counted):
        num_bytes = tf.zeros([2], tf.float64)
        for sent, received in counted:
            num_bytes += tf.cast(tf.stack([sent, received]), tf.float64)
        seconds = compat.timestamp() - begin
        self._totals.add(tf.concat([[1.0, seconds], num_bytes], axis=0))

    def totals(self):
        return Totals(*self._totals.numpy().tolist())


def count(elements, dtype):
    """Notes what the collective that is being traced moves.

    An engine calls it.

    Args:
        elements: function without arguments that gives the numbers of elements
            sent and received, numbers or integer tensors. Not called where
            nothing is counted.
        dtype: their dtype.
    """
    counted = getattr(_tracing, "counted", None)
    if counted is not None:
        counted.append([tf.cast(n, tf.int64) * dtype.size for n in elements()])


def count_ring(flat, size):
    """Notes an AllReduce of a flat tensor in a ring of so many."""
    count(
        lambda: [2 * (size - 1) * tf.size(flat, tf.int64) // size] * 2,
        flat.dtype,
    )
