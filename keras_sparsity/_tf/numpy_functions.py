"""Python functions of a graph that go with the object whose step has them.

TensorFlow keeps the functions of `tf.numpy_function`, of all graphs that are
traced, as long as the process's own graph (`_py_funcs_used_in_graph`), and with
them all that they refer to: models, sessions, and the graphs themselves.

Checked on TensorFlow 2.16 to 2.21.
"""

import weakref

import tensorflow as tf


class NumpyFunctions:
    """`tf.numpy_function`, for an owner that has this object.

    Without the owner nobody runs the graphs.
    """

    def __init__(self):
        self._functions = []

    def __call__(self, function, inputs, dtypes, stateful=True):
        if not tf.executing_eagerly():
            self._functions.append(function)
            function = _weakly(function)
        return tf.numpy_function(function, inputs, dtypes, stateful=stateful)


def _weakly(function):
    found = weakref.ref(function)
    return lambda *values: found()(*values)
