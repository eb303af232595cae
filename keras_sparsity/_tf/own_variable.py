"""Variables that this package keeps for itself."""

import tensorflow as tf

from keras_sparsity._tf import tf_context, tf_graphs


class OwnVariable:
    """A variable of this process, on the CPU, unknown to models and strategies.

    Not a `tf.Variable`: a traced function refuses to create those after its
    first call, and strategies place and mirror them. It is freed when neither
    this object nor a function that was traced with it is left.

    Args:
        value: the first value.
        shape: by default that of the value; unknown dimensions may change.
    """

    def __init__(self, value, dtype, shape=None):
        self._dtype = tf.as_dtype(dtype)
        # Out of any function that is being traced.
        with tf.init_scope(), tf.device("CPU:0"):
            value = tf.convert_to_tensor(value, self._dtype)
            shape = value.shape if shape is None else shape
            self._shape = tf.TensorShape(shape)
            self._handle = tf.raw_ops.VarHandleOp(
                dtype=self._dtype,
                shape=self._shape,
                shared_name=tf_context.anonymous_name(),
            )
            self.assign(value)

    def assign(self, value):
        return tf.raw_ops.AssignVariableOp(
            resource=tf_graphs.captured(self._handle), value=value
        )

    def add(self, amount):
        return tf.raw_ops.AssignAddVariableOp(
            resource=tf_graphs.captured(self._handle),
            value=tf.convert_to_tensor(amount, self._dtype),
        )

    def add_at(self, rows, amount):
        """Adds to elements, to duplicates in `rows` several times."""
        return tf.raw_ops.ResourceScatterAdd(
            resource=tf_graphs.captured(self._handle),
            indices=rows,
            updates=tf.constant(amount, self._dtype),
        )

    def read(self):
        value = tf.raw_ops.ReadVariableOp(
            resource=tf_graphs.captured(self._handle), dtype=self._dtype
        )
        value.set_shape(self._shape)  # a captured handle has none
        return value

    def numpy(self):
        """The value as it is now. Not in a traced function."""
        return tf.raw_ops.ReadVariableOp(
            resource=self._handle, dtype=self._dtype
        ).numpy()
