"""The only file that uses private names of TensorFlow and Keras.

Each function names the versions it was checked on; `tests/test_compat.py`
calls each one, so that a new version that breaks one says which.
"""

import itertools
import weakref

import tensorflow as tf

_graph_numbers = weakref.WeakKeyDictionary()
_next_graph_number = itertools.count(1)


def outermost_graph():
    """The outermost `tf.function` graph being traced; None when eager.

    `FuncGraph.outer_graph`: TensorFlow 2.16 to 2.21.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while isinstance(getattr(graph, "outer_graph", None), tf.Graph):
        if not hasattr(graph.outer_graph, "outer_graph"):
            break
        graph = graph.outer_graph
    return graph


def outermost_function():
    """The number of the outermost function being traced; None when eager."""
    graph = outermost_graph()
    if graph is None:
        return None
    if graph not in _graph_numbers:
        _graph_numbers[graph] = next(_next_graph_number)
    return _graph_numbers[graph]


def abort_collectives(message):
    """Makes all running and later native collectives fail with `message`.

    `context().abort_collective_ops`: TensorFlow 2.16 to 2.21.
    """
    from tensorflow.python.eager import context

    context.context().abort_collective_ops(tf.errors.ABORTED, message)
