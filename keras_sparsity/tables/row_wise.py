"""Regularizers and constraints that act on each row by itself."""

import keras
import tensorflow as tf

_OF_OWNERS = "_keras_sparsity_is_of_owners"


class SpreadRegularizer(keras.regularizers.Regularizer):
    """A regularizer of the whole table, from each owner's part of it.

    Keras divides a regularizer's loss by the number of replicas, as each
    replica adds the loss of the whole table. So the value is that of the whole
    table on every rank, and the gradient of each owner's part is multiplied by
    the number of replicas.
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
        ids = table.layout.owned_rows(rank)
        values = tf.concat(gradients, axis=0) * communicator.num_workers

        @tf.custom_gradient
        def attach(anchor, total, values):
            del anchor

            def spread(upstream):
                shape = tf.constant([table.num_rows, table.dim], tf.int64)
                slices = tf.IndexedSlices(
                    values * upstream, tf.constant(ids), shape
                )
                return slices, None, None

            return tf.identity(total), spread

        loss = attach(tf.convert_to_tensor(variable.value), total, values)
        setattr(loss, _OF_OWNERS, True)
        return loss


def is_of_owners(loss):
    """Whether a rank's gradient of a loss is of the rows that it owns."""
    return getattr(loss, _OF_OWNERS, False)


_ADDS_UP = tuple(
    getattr(keras.regularizers, name) for name in ("L1", "L2", "L1L2")
)
_BY_ROWS = tuple(
    getattr(keras.constraints, name)
    for name in ("MaxNorm", "MinMaxNorm", "UnitNorm")
)
_INSTEAD = (
    'With architecture="allreduce", given to the layer or the strategy, every '
    "process has the whole table, which takes any."
)


def check_acts_on_rows(owner_name, regularizer, constraint):
    """Raises unless both act on each row by itself."""
    if regularizer is not None and not _computes_as(regularizer, _ADDS_UP):
        raise ValueError(
            f"'{owner_name}': a table that is spread over processes takes "
            "Keras's regularizers L1, L2 and L1L2, which add up over its rows, "
            "and no subclass that computes something else. "
            f"Received: {regularizer}. {_INSTEAD}"
        )
    if not acts_on_rows(constraint):
        raise ValueError(
            f"'{owner_name}': a table that is spread over processes takes "
            "Keras's constraints that act on each row by itself: NonNeg, or "
            "MaxNorm, MinMaxNorm and UnitNorm with axis=1; and no subclass "
            f"that computes something else. Received: {constraint} with "
            f"axis={getattr(constraint, 'axis', None)}. {_INSTEAD}"
        )


def is_non_negative(constraint):
    """Whether a constraint is `NonNeg`."""
    return _computes_as(constraint, (keras.constraints.NonNeg,))


def acts_on_rows(constraint):
    """Whether a constraint, or None, changes each row of a table by itself."""
    if constraint is None or is_non_negative(constraint):
        return True
    axis = getattr(constraint, "axis", None)
    is_of_rows = axis in (1, -1, [1], (1,), [-1], (-1,))
    return is_of_rows and _computes_as(constraint, _BY_ROWS)


def _computes_as(thing, kinds):
    """Whether it is called as one of these classes is: by their own code.

    A subclass may add another `__init__` or `get_config`.
    """
    return any(type(thing).__call__ is kind.__call__ for kind in kinds)
