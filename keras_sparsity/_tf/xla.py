"""The parts of a step that XLA compiles, where messages keep it from the whole.

XLA cannot compile Horovod's operations, and would make of TensorFlow's
collectives its own, which know no other process. `tf.xla.experimental.
jit_scope` marks operations instead: clusters of marked ones are compiled, each
after a few steps with equal shapes. Checked on TensorFlow 2.16 to 2.21.
"""

import contextlib

import tensorflow as tf

from keras_sparsity._tf import contexts

_are_asked_for = [False]  # of the steps around, the innermost last


@contextlib.contextmanager
def compiled_between_messages(is_asked_for):
    """While entered, what a step traces is compiled, but for messages.

    Args:
        is_asked_for: False changes nothing.
    """
    with contexts.on_top(_are_asked_for, is_asked_for), _marked(True):
        yield


def compiled():
    """While entered, operations are compiled, if that was asked for."""
    return _marked(True)


def not_compiled():
    """While entered, no operation is compiled.

    For rows of tables: their number changes from step to step, and a cluster
    is compiled anew for each shape.
    """
    return _marked(False)


def _marked(is_compiled):
    if not _are_asked_for[-1] or tf.executing_eagerly():
        return contextlib.nullcontext()
    return tf.xla.experimental.jit_scope(is_compiled and _is_no_message)


def _is_no_message(node):
    return not node.op.startswith("Collective")
