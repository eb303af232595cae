"""Rows of an `Embedding` that a step reads at a server."""

import tensorflow as tf


class PulledRows:
    """Of a `CurrentVariable`: has its readers get rows from a server.

    Args:
        variable: the model's variable.
        pull: function of row numbers, a NumPy array, that returns the rows.
        layer_name: the layer's name, for messages.
    """

    # What `CurrentVariable` asks for.
    is_writing = is_replica = False

    def __init__(self, variable, pull, layer_name):
        self._variable, self._pull = variable, pull
        self._layer_name = layer_name

    def rows_now(self, variable, ids, rows):
        """Rows from their server, with the gradient of the stored ones."""
        unique, index = tf.unique(tf.reshape(tf.cast(ids, tf.int64), [-1]))
        pulled = tf.numpy_function(
            self._pull, [unique], variable.dtype, stateful=True
        )
        pulled.set_shape([None, *variable.shape[1:]])
        current = tf.reshape(tf.gather(pulled, index), tf.shape(rows))

        @tf.custom_gradient
        def replaced(rows):
            return tf.identity(current), tf.identity

        return replaced(rows)

    def settle(self):
        raise ValueError(
            f"A training step reads the whole table of '{self._layer_name}', "
            "as a regularizer or a layer that shares it does. Under "
            '`delay="bounded"` the rows of an Embedding are at a server. Read '
            'rows alone, or use `delay="fixed"`.'
        )

    def note_write(self, variable):
        self.settle()
