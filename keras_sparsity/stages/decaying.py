"""A variable whose rows shrink in each step that does not write them."""

import tensorflow as tf

from keras_sparsity._tf.current_variable import (
    make_current,
    store_rows,
    stored_rows,
)


class DecayingRows:
    """Keeps rows that shrink by a factor a step, and brings them up to date.

    A step costs as much as the rows that it writes, however many there are:
    the others are multiplied by a power of the factor when they are read.

    Args:
        variable: a `tf.Variable` with one row for each of a table's.
        factor: the factor of a step.
    """

    # For `CurrentVariable`, of which this is the keeper: reading all of it
    # stores nothing.
    is_replica, is_writing = True, False

    def __init__(self, variable, factor):
        self._variable, self._factor = make_current(variable), factor
        with tf.init_scope():
            self._now = tf.Variable(0, trainable=False)
            # Of each row: the step in which it was written.
            self._steps = tf.Variable(
                tf.zeros(variable.shape[:1], tf.int32), trainable=False
            )
        variable.keeper = self

    def rows_now(self, variable, ids, rows):
        return rows * self._powers(tf.gather(self._steps, ids), variable)

    def whole_now(self, variable, stored):
        return stored * self._powers(self._steps.read_value(), variable)

    def settle(self):
        """Brings all rows up to date, and stores them."""
        every = tf.range(self._variable.shape[0])
        rows = stored_rows(self._variable, every)
        store_rows(
            self._variable, every, self.rows_now(self._variable, every, rows)
        )
        self.note_write(self._variable)

    def note_write(self, variable):
        """All rows are up to date."""
        del variable
        self._steps.assign(tf.zeros_like(self._steps))
        self._now.assign(0)

    def advance(self, ids, rows):
        """Ends a step.

        Args:
            ids: int tensor `(n,)` without duplicates.
            rows: tensor `(n, dim)`, which these rows are from now on.
        """
        now = self._now.assign_add(1)
        store_rows(self._variable, ids, rows)
        self._steps.scatter_update(
            tf.IndexedSlices(tf.fill(tf.shape(ids), now), ids)
        )

    def _powers(self, steps, variable):
        number = tf.cast(self._now.read_value() - steps, variable.dtype)
        factor = tf.constant(self._factor, variable.dtype)
        return (factor**number)[..., None]
