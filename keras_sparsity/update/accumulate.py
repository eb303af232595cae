"""Gradient accumulation, of the touched rows of tables alone."""

import tensorflow as tf

from keras_sparsity._tf import keras_optimizers
from keras_sparsity._tf.current_variable import store_rows, stored_rows
from keras_sparsity.health import journal
from keras_sparsity.health.journal import UPDATE


class RowAccumulator:
    """Sums of the gradients of a table's rows, and which rows have one.

    The sums are the Keras optimizer's, so that files hold them. The rows are
    found anew, in the whole table, after anything else has written it.

    Args:
        variable: `tf.Variable`, the sums of all rows.
        num_writes: `tf.Variable` that counts writes of the table.
    """

    def __init__(self, variable, num_writes):
        self._sums, self._num_writes = variable, num_writes
        self._rows = tf.Variable(
            tf.zeros([0], tf.int64), shape=[None], trainable=False
        )
        self._num_seen = tf.Variable(-1, dtype=tf.int64, trainable=False)

    def add(self, gradient):
        """Adds `tf.IndexedSlices` without duplicates."""
        rows = tf.cast(gradient.indices, tf.int64)
        # First of all: sums say which rows have one.
        known, _ = tf.unique(tf.concat([self._known(), rows], 0))
        sums = stored_rows(self._sums, rows) + gradient.values
        store_rows(self._sums, rows, sums)
        self._remember(known)

    def take(self, gradient, num_steps):
        """The mean over `num_steps`, of a last gradient, too; begins anew.

        Returns:
            `tf.IndexedSlices` without duplicates.
        """
        rows = tf.cast(gradient.indices, tf.int64)
        known = self._known()
        all_rows, index = tf.unique(tf.concat([known, rows], 0))
        sums = tf.tensor_scatter_nd_add(
            stored_rows(self._sums, all_rows),
            index[tf.size(known) :, None],
            gradient.values,
        )
        store_rows(self._sums, all_rows, tf.zeros_like(sums))
        self._remember(all_rows[:0])
        return tf.IndexedSlices(sums / num_steps, all_rows)

    def end_step(self):
        """The table was written by a step of its optimizer."""
        self._num_seen.assign(self._num_writes)

    def _known(self):
        return tf.cond(
            self._num_seen == self._num_writes,
            self._rows.read_value,
            self._found,
        )

    def _found(self):
        sums = tf.raw_ops.ReadVariableOp(
            resource=self._sums.handle, dtype=self._sums.dtype
        )
        return tf.where(tf.reduce_any(sums != 0, axis=1))[:, 0]

    def _remember(self, rows):
        self._rows.assign(rows)
        self.end_step()


def is_applied(rule):
    """Whether the step under way applies a rule, and does not only add up."""
    step = tf.convert_to_tensor(keras_optimizers.iterations(rule)) + 1
    return step % (rule.gradient_accumulation_steps or 1) == 0


def accumulate(rule, updates, accumulator_of, apply):
    """Applies a rule to the mean gradient of several steps, or waits.

    As Keras's optimizers do, but that accumulators of tables are updated by
    rows.

    Args:
        rule: a Keras optimizer that accumulates gradients.
        updates: list of `Update`.
        accumulator_of: function of a variable: its `RowAccumulator`, or None.
        apply: function of a rule that does not accumulate, and of updates.
    """
    num_steps = rule.gradient_accumulation_steps
    iterations = keras_optimizers.iterations(rule)
    sums = list(getattr(rule, keras_optimizers.GRADIENT_SUMS))
    index_of = [
        keras_optimizers.variable_index(rule, u.variable) for u in updates
    ]
    notes = journal.current()
    by_rows = {
        index: accumulator_of(update.variable)
        for index, update in zip(index_of, updates, strict=True)
        if isinstance(update.gradient, tf.IndexedSlices)
    }

    def add():
        with notes.measured(UPDATE, [u.values for u in updates]):
            keep()

    def keep():
        for index, update in zip(index_of, updates, strict=True):
            if index in by_rows:
                by_rows[index].add(update.gradient)
            else:
                sums[index].assign_add(update.gradient)
                variable = update.variable
                # Keras applies it after every step.
                if getattr(variable, "constraint", None) is not None:
                    variable.assign(variable.constraint(variable))
        iterations.assign_add(1)

    def take():
        means = [
            by_rows[index].take(update.gradient, num_steps)
            if index in by_rows
            else (update.gradient + sums[index]) / num_steps
            for index, update in zip(index_of, updates, strict=True)
        ]
        apply(
            keras_optimizers.without_accumulation(rule),
            [u.replaced(g) for u, g in zip(updates, means, strict=True)],
        )
        for index, of_variable in enumerate(sums):
            if index in by_rows:
                by_rows[index].end_step()
            elif of_variable is not None:
                zeros = tf.zeros(of_variable.shape, of_variable.dtype)
                of_variable.assign(zeros)

    tf.cond(is_applied(rule), take, add)
