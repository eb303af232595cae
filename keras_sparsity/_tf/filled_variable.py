"""Large variables whose first value is never stored twice.

`tf.Variable(value)` holds `value` and a copy of it until it returns. With
oneDNN, TensorFlow's allocator for the CPU keeps the memory of the former for
as long as the process lives.

Checked on TensorFlow 2.16 to 2.21.
"""

import contextlib

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import (
    ResourceVariable,
    UninitializedVariable,
)


def filled(value, shape, dtype, trainable=False, name=None):
    """A `tf.Variable` of one number, the value."""
    with tf.init_scope():
        variable = UninitializedVariable(
            trainable=trainable,
            name=name,
            shape=tf.TensorShape(shape),
            dtype=tf.as_dtype(dtype),
        )
        variable.__class__ = ResourceVariable
        value = tf.cast(value, dtype)
        _fill(variable.handle, value, tf.constant(shape, tf.int32))
    return variable


@contextlib.contextmanager
def filling(value, shape):
    """Context in which TensorFlow makes variables of one number, the value.

    Yields:
        An initializer for variables that Keras makes, whose values nobody
        needs.
    """

    def create(next_creator, *, dtype, name=None, **kwargs):
        return filled(value, shape, dtype, name=name)

    with tf.variable_creator_scope(create):
        yield lambda shape, dtype=None: tf.zeros((), dtype)


@tf.function(autograph=False, reduce_retracing=True)
def _fill(handle, value, shape):
    # In a function the variable takes the memory of the operation's result.
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.fill(shape, value))
