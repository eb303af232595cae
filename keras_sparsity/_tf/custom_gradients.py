"""Custom gradients that go with the model whose step has them.

TensorFlow keeps the function of each custom gradient of a graph for ever
(`ops.gradient_registry`), and with it all that the function refers to: the
graph, the memory of all variables that it reads, and tables.

Checked on TensorFlow 2.16 to 2.21.
"""

import weakref

import tensorflow as tf

from keras_sparsity._tf import tf_graphs

# Of the operation by which `tf.custom_gradient` gives its results.
_KIND, _GRADIENT, _PREFIX = "IdentityN", "_gradient_op_type", "CustomGradient-"


def forget_with(owner):
    """Has TensorFlow forget custom gradients when an object is freed.

    Those of the graph that is being traced, of a function or a branch, so far.
    Not those of functions that are called in it: they may have other callers.

    Args:
        owner: an object without which nobody runs the graph.
    """
    if tf.executing_eagerly():
        return
    operations = tf_graphs.current().get_operations()
    names = [_name(each) for each in operations if each.type == _KIND]
    names = [name for name in names if name.startswith(_PREFIX)]
    weakref.finalize(owner, _forget, names).atexit = False


def _name(operation):
    """That of an operation's gradient in the registry."""
    try:
        return operation.get_attr(_GRADIENT).decode()
    except ValueError:  # It has TensorFlow's own.
        return ""


def _forget(names):
    from tensorflow.python.framework import ops

    for name in names:
        ops.gradient_registry._registry.pop(name, None)
