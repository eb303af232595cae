"""Times and bytes of collectives, counted inside the step.

A step that is traced while `Journal.measures` is set counts them, with a few
more operations per call.
"""

import contextlib
import dataclasses
import operator
import threading

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import tf_graphs
from keras_sparsity._tf.own_variable import OwnVariable

_tracing = threading.local()


@dataclasses.dataclass(frozen=True)
class Totals:
    """Totals of one rank, which can be added and subtracted.

    Args:
        calls: Number of calls.
        seconds: From the computation of the inputs to that of the outputs,
            including the time of waiting for other ranks.
        sent_bytes, received_bytes: The engine's traffic with other ranks.
    """

    calls: float = 0.0
    seconds: float = 0.0
    sent_bytes: float = 0.0
    received_bytes: float = 0.0

    def __add__(self, other):
        return Totals(*map(operator.add, self.to_list(), other.to_list()))

    def __sub__(self, other):
        return Totals(*map(operator.sub, self.to_list(), other.to_list()))

    def to_list(self):
        return list(dataclasses.astuple(self))


class Meter:
    """The totals of one place in one traced function."""

    def __init__(self):
        # One variable, so that one operation adds to all.
        self._totals = OwnVariable(np.zeros(4), tf.float64)

    def measured(self, run):
        """Returns `run()`, measured from its control dependencies on."""
        begin = tf_graphs.timestamp()
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
        """Measures the operations traced inside, from `inputs` on."""
        graph = tf.compat.v1.get_default_graph()
        with tf.control_dependencies(inputs):
            begin = tf_graphs.timestamp()
        num_before = len(graph.get_operations())
        yield
        with tf.control_dependencies(graph.get_operations()[num_before:]):
            self._add(begin, [])

    def _add(self, begin, counted):
        num_bytes = tf.zeros([2], tf.float64)
        for sent, received in counted:
            num_bytes += tf.cast(tf.stack([sent, received]), tf.float64)
        seconds = tf_graphs.timestamp() - begin
        self._totals.add(tf.concat([[1.0, seconds], num_bytes], axis=0))

    def totals(self):
        return Totals(*self._totals.numpy().tolist())


def count(elements, dtype):
    """Counts the traffic of the collective being traced; for engines.

    Args:
        elements: Function without arguments that returns the numbers of
            elements sent and received, integers or integer tensors. Called
            only if the collective is measured.
        dtype: Their dtype.
    """
    counted = getattr(_tracing, "counted", None)
    if counted is not None:
        counted.append([tf.cast(n, tf.int64) * dtype.size for n in elements()])


def count_ring(flat, size):
    """Counts an AllReduce of a flat tensor in a ring of `size` ranks."""
    count(
        lambda: [2 * (size - 1) * tf.size(flat, tf.int64) // size] * 2,
        flat.dtype,
    )
