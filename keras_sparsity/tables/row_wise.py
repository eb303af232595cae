"""What acts on each row of a table by itself, and so on its parts."""

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity.tables.exchange import row_gradient


class SpreadRegularizer(keras.regularizers.Regularizer):
    """A regularizer of the whole table, from each owner's part of it.

    Keras divides what a regularizer adds to the loss by the number of
    replicas, expecting each of them to add the whole. The value is therefore
    the whole one, on every rank, and the gradient of each owner's part is
    multiplied by the number of replicas.
    """

    def __init__(self, table, inner):
        self._table = table
        self._inner = inner

    def __call__(self, variable):
        table = self._table
        communicator = table.collectives
        rank = communicator.rank
        partitions = [
            tf.stop_gradient(p.value)[: p.num_rows] for p in table.partitions
        ]
        with tf.GradientTape() as tape:
            tape.watch(partitions)
            mine = tf.add_n([self._inner(rows) for rows in partitions])
        gradients = tape.gradient(mine, partitions)
        (total,) = communicator.all_reduce(
            [mine], name=f"{table.role}/regularizer"
        )
        ids = np.concatenate(
            [
                table.layout.rows_of(p)
                for p in table.layout.owned_partitions(rank)
            ]
            or [np.zeros(0, np.int64)]
        )
        values = tf.concat(gradients, axis=0) * communicator.size

        @tf.custom_gradient
        def attach(anchor, total, values):
            del anchor

            def spread(upstream):
                slices = row_gradient(
                    table, values * upstream, tf.constant(ids)
                )
                return slices, None, None

            return tf.identity(total), spread

        return attach(tf.convert_to_tensor(variable.value), total, values)


def check_acts_on_rows(owner_name, regularizer, constraint):
    """Raises unless both act on each row by itself."""
    by_elements = (
        keras.regularizers.L1,
        keras.regularizers.L2,
        keras.regularizers.L1L2,
    )
    if regularizer is not None and not isinstance(regularizer, by_elements):
        raise ValueError(
            f"'{owner_name}': a table that is spread over processes takes the "
            "regularizers L1, L2 and L1L2, which add up over its rows. "
            f"Received: {regularizer}."
        )
    if not acts_on_rows(constraint):
        raise ValueError(
            f"'{owner_name}': a table that is spread over processes takes "
            "constraints that act on each row by itself: NonNeg, or MaxNorm, "
            "MinMaxNorm and UnitNorm with axis=1. "
            f"Received: {constraint} with "
            f"axis={getattr(constraint, 'axis', None)}."
        )


def acts_on_rows(constraint):
    """Whether a constraint, or None, changes each row of a table by itself."""
    if constraint is None or isinstance(constraint, keras.constraints.NonNeg):
        return True
    axis = getattr(constraint, "axis", None)
    return axis in (1, -1, [1], (1,), [-1], (-1,))
