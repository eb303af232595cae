"""Rows that a step moves without a gradient, brought up to date when read."""

import math

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import keras_optimizers
from keras_sparsity._tf.current_variable import store_rows, with_gradient_of
from keras_sparsity.tables.readers import Readers
from keras_sparsity.update.accumulate import RowAccumulator, is_applied
from keras_sparsity.update.current_rows import CurrentRows, Piece, note, noted
from keras_sparsity.update.step_sums import StepSums

# So much of a table is brought up to date at a time.
_BLOCK_BYTES = 1 << 22
# The step of a row that has none: zero in all slots, which stay so.
_NEVER = -1


class KeptRows:
    """One table's rows, updated with others' zero gradients when needed.

    The rule of an optimizer updates touched rows alone. `ClosedForm` computes
    the effect of any number of steps with a zero gradient on an untouched row:
    a read returns the row as it would be by now, and the next update stores it.
    So a step costs the same for tables of any length.

    Reading rows changes nothing stored: an evaluation, or a row that is read
    twice, leaves training as it was, to the bit. Reading the whole table
    stores all rows, but for replicas: those of all ranks are to stay the same
    bits, and one rank may read alone.

    Args:
        rule: the Keras optimizer.
        form: `ClosedForm`.
        pieces: list of the variables that the rule updates.
        slots: their slots, as `rows.slots_of` gives them.
        table: the `ShardedTable`, or the `Lookup` of an `Embedding`.
        are_zero: whether the slots are zero.

    Attributes:
        is_replica: whether other ranks have the same rows.
    """

    def __init__(self, rule, form, pieces, slots, table, are_zero):
        self.rule, self.form = rule, form
        self.is_replica = table.has_replicas
        # While its own writes are traced, or run.
        self.is_writing = False
        self.readers = Readers()
        self._may_rest = not (
            form.weight_decay
            or form.changes_new_rows
            or form.is_non_negative
            or form.average is not None
        )
        first = _NEVER if are_zero and self._may_rest else 0
        with tf.init_scope():
            self.sums = StepSums(form, table.num_rows)
            # Of steps, from outside, and of all rows.
            self.num_writes = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._pieces = [
                Piece(
                    piece.value,
                    {
                        kind: of_kind[index].value
                        for kind, of_kind in slots.items()
                    },
                    tf.Variable(
                        np.full(piece.shape[0], first, np.int32),
                        trainable=False,
                    ),
                )
                for index, piece in enumerate(pieces)
            ]
            for piece in self._pieces:
                sums = piece.slots.get(keras_optimizers.GRADIENT_SUMS)
                if sums is not None:
                    piece.accumulator = RowAccumulator(sums, self.num_writes)
        self._piece_of = {}
        for piece in self._pieces:
            for variable in (piece.weights, *piece.slots.values()):
                variable.keeper = self
                self._piece_of[id(variable)] = piece

    # For `CurrentVariable`.

    def rows_now(self, variable, ids, rows):
        """Rows of the weights or of a slot as they would be by now.

        Args:
            variable: the `tf.Variable`.
            ids: integer tensor of any shape.
            rows: the stored rows, of which the gradient is the result's.
        """
        self.readers.note()
        piece = self._piece_of[id(variable)]
        # Each row once, however often it is read.
        unique, index = tf.unique(tf.reshape(ids, [-1]))
        current = CurrentRows(self, piece, unique)
        if variable is piece.weights:
            note(current)
        result = tf.gather(current[variable], tf.reshape(index, tf.shape(ids)))
        return with_gradient_of(rows, result)

    def whole_now(self, variable, stored):
        """All rows of the weights or of a slot as they would be by now.

        Args:
            variable: the `tf.Variable`.
            stored: the stored rows, of which the gradient is the result's.
        """
        self.readers.note()
        piece = self._piece_of[id(variable)]
        count = _rows_of_block(piece)
        starts = range(0, piece.num_rows, count)
        num_blocks = len(starts)

        def body(block, rows):
            start = block * count
            ids = tf.range(start, tf.minimum(start + count, piece.num_rows))
            current = CurrentRows(self, piece, ids)[variable]
            return block + 1, rows.write(block, current)

        def compute():
            rows = tf.TensorArray(
                variable.dtype,
                num_blocks,
                infer_shape=False,
                element_shape=[None, *variable.shape[1:]],
            )
            _, rows = tf.while_loop(
                lambda block, _: block < num_blocks,
                body,
                (tf.constant(0), rows),
                parallel_iterations=1,
            )
            return tf.ensure_shape(rows.concat(), variable.shape)

        unchanged = tf.stop_gradient(stored)
        is_behind = self.sums.checked_now() > 0
        result = tf.cond(is_behind, compute, lambda: unchanged)
        return with_gradient_of(stored, result)

    def rows_after_step(self, variable, ids):
        """Rows as they will be after the step under way.

        If that step is applied, and updates none of them.

        Args:
            variable: the `tf.Variable` of the weights.
            ids: integer tensor of any shape.
        """
        piece = self._piece_of[id(variable)]
        unique, index = tf.unique(tf.reshape(ids, [-1]))

        def rows_after(step):
            return CurrentRows(self, piece, unique, step)[variable]

        if self.rule.gradient_accumulation_steps:
            rows = tf.cond(
                is_applied(self.rule),
                lambda: rows_after(self.next_step()),
                lambda: rows_after(None),
            )
        else:
            rows = rows_after(self.next_step())
        return tf.gather(rows, tf.reshape(index, tf.shape(ids)))

    def settle(self):
        """Brings all rows up to date, and stores them."""
        self.readers.note()
        is_behind = self.sums.checked_now() > 0
        tf.cond(is_behind, self._settle, lambda: tf.constant(False))

    def note_write(self, variable):
        """Something else has written rows, which were up to date.

        Rows of zero slots rest, whatever their weights.

        Args:
            variable: the `tf.Variable` that was written.
        """
        self.num_writes.assign_add(1)
        piece = self._piece_of[id(variable)]
        if variable is not piece.weights:
            piece.steps.assign(tf.zeros(piece.steps.shape, tf.int32))

    # For the optimizer.

    def release(self):
        """Brings all rows up to date, and leaves them to another optimizer.

        Functions that were traced before know nothing of the other optimizer's
        steps: those of models are traced anew, others end with an error.
        """
        self.settle()
        self.sums.end()
        self.readers.trace_anew()
        for piece in self._pieces:
            for variable in (piece.weights, *piece.slots.values()):
                variable.keeper = None

    def accumulator_of(self, variable):
        """The `RowAccumulator` of a variable that the rule updates."""
        return self._piece_of[id(variable.value)].accumulator

    def next_step(self):
        """`Step` that the rule is about to apply."""
        return self.sums.next_step(self.rule)

    def read(self, variable, rows):
        """Rows of the weights and of all slots, for the rule to update.

        Rows that the same step has pulled are not computed anew.

        Args:
            variable: the variable that the rule updates.
            rows: int tensor without duplicates.

        Returns:
            Dict from the `id` of each `tf.Variable` to a tensor.
        """
        piece = self._piece_of[id(variable.value)]
        variables = piece.weights, *piece.slots.values()

        def anew():
            current = CurrentRows(self, piece, rows)
            return [current[v] for v in variables]

        pulled = noted(piece)
        if pulled is None:
            tensors = anew()
        else:
            of_pulled = [pulled[v] for v in variables]
            tensors = tf.cond(pulled.are_still(rows), lambda: of_pulled, anew)
        return dict(zip(map(id, variables), tensors, strict=True))

    def advance(self, numbers, rows):
        """A step was applied, and its rows are stored.

        Args:
            numbers: result of `next_step`.
            rows: list of `(piece, rows)`: variables, and int tensors without
                duplicates, of all rows that were updated.
        """
        self.num_writes.assign_add(1)
        step = self.sums.now + 1
        for piece, of_piece in rows:
            steps = tf.fill(tf.shape(of_piece), step)
            self._piece_of[id(piece.value)].steps.scatter_update(
                tf.IndexedSlices(steps, of_piece)
            )
        is_full = self.sums.extend(numbers)
        tf.cond(is_full, self._settle, lambda: tf.constant(False))

    def _behind(self, steps):
        """Places of the steps of rows that are behind."""
        is_behind = (steps >= 0) & (steps < self.sums.now)
        return tf.where(is_behind)[:, 0]

    def _settle(self):
        for piece in self._pieces:
            self._settle_piece(piece)
        self.sums.reset()
        # Rows that a step has pulled before are of earlier sums.
        self.num_writes.assign_add(1)
        return tf.constant(True)

    def _settle_piece(self, piece):
        count = _rows_of_block(piece)

        def body(start):
            # Of a fixed length, as XLA asks: the last block begins earlier.
            first = tf.minimum(start, piece.num_rows - count)
            ids = first + tf.range(count, dtype=tf.int64)
            ids = tf.gather(ids, self._behind(tf.gather(piece.steps, ids)))
            variables = piece.weights, *piece.slots.values()
            current = CurrentRows(self, piece, ids)
            rows = [current[v] for v in variables]
            for variable, of_variable in zip(variables, rows, strict=True):
                store_rows(variable, ids, of_variable)
            steps = tf.where(self._are_at_rest(current), _NEVER, self.sums.now)
            piece.steps.scatter_update(tf.IndexedSlices(steps, ids))
            return (start + count,)

        tf.while_loop(
            lambda start: start < piece.num_rows,
            body,
            (tf.constant(0, tf.int64),),
            parallel_iterations=1,
        )
        piece.steps.assign(tf.minimum(piece.steps, 0))

    def _are_at_rest(self, current):
        """Of each of these rows, whether steps without a gradient leave it."""
        shape = tf.shape(current.ids)
        if not self._may_rest:
            return tf.fill(shape, False)
        are_at_rest = tf.fill(shape, True)
        for kind, slot in current.piece.slots.items():
            # Those that stay move no weights by themselves.
            if self.form.factors.get(kind, 1) != 1:
                axes = range(1, slot.shape.rank)
                are_at_rest &= tf.reduce_all(current[slot] == 0, axis=axes)
        return are_at_rest


def _rows_of_block(piece):
    """How many rows of a piece are brought up to date at a time."""
    row_bytes = math.prod(piece.weights.shape[1:]) * piece.weights.dtype.size
    count = max(1, _BLOCK_BYTES // max(row_bytes, 1))
    return min(count, piece.num_rows)
