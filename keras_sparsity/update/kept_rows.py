"""Rows that a step moves without a gradient, brought up to date when read."""

import contextlib
import dataclasses
import math

import numpy as np
import tensorflow as tf

from keras_sparsity._tf.current_variable import (
    CurrentVariable,
    keeper_of,
    make_current,
    store_rows,
    stored_rows,
)
from keras_sparsity.update.closed_form import closed_form_of
from keras_sparsity.update.step_sums import StepSums

# So much of a table is brought up to date at a time.
_BLOCK_BYTES = 1 << 22
# The step of a row that has none: zero in all slots, which stay so.
_NEVER = -1


@dataclasses.dataclass
class Piece:
    """A partition, or a whole table, of `KeptRows`.

    Attributes:
        weights: its `tf.Variable`.
        slots: dict from kinds of slots to `tf.Variable`s.
        steps: `tf.Variable`: the step of each row.
    """

    weights: tf.Variable
    slots: dict
    steps: tf.Variable

    @property
    def num_rows(self):
        return self.weights.shape[0]


class KeptRows:
    """One table's rows, updated with others' zero gradients when needed.

    The rule of an optimizer updates touched rows alone. What it would have
    done to the others meanwhile, `ClosedForm` tells, for any number of steps:
    whoever reads rows is given them as they would be by now, and the next
    update stores them. So a step costs the same for tables of any length.

    Reading rows changes nothing stored: an evaluation, or a row that is read
    twice, leaves training as it was, to the bit. Reading the whole table
    stores all rows.

    Args:
        rule: the Keras optimizer.
        form: `ClosedForm`.
        pieces: list of the variables that the rule updates.
        slots: their slots, as `rows.slots_of` gives them.
        num_rows: number of rows of the whole table.
        are_zero: whether the slots are zero.
    """

    def __init__(self, rule, form, pieces, slots, num_rows, are_zero):
        self.rule, self.form = rule, form
        # While its own writes are traced, or run.
        self.is_writing = False
        first = _NEVER if are_zero and not form.weight_decay else 0
        with tf.init_scope():
            self._sums = StepSums(form, num_rows)
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
        piece = self._piece_of[id(variable)]
        flat = tf.reshape(ids, [-1])
        stored = tf.reshape(
            tf.stop_gradient(rows), tf.concat([[-1], variable.shape[1:]], 0)
        )
        steps = tf.gather(piece.steps, flat)
        behind = self._behind(steps)
        # Each row once, however often it is read.
        unique, index = tf.unique(tf.gather(flat, behind))
        result = self._current(piece, unique, variable)
        result = tf.tensor_scatter_nd_update(
            stored, behind[:, None], tf.gather(result, index)
        )
        result = tf.reshape(result, tf.shape(rows))
        result.set_shape(rows.shape)
        return _with_gradient_of(rows, result)

    def settle(self):
        """Brings all rows up to date, and stores them."""
        tf.cond(self._sums.now > 0, self._settle, lambda: tf.constant(False))

    def note_write(self):
        """Something else has written rows, which were up to date."""
        for piece in self._pieces:
            piece.steps.assign(tf.zeros(piece.steps.shape, tf.int32))

    # For the optimizer.

    def next_step(self):
        """Numbers of the step that the rule is about to apply."""
        return self._sums.next_step(self.rule)

    def advance(self, numbers, rows):
        """A step was applied, and its rows are stored.

        Args:
            numbers: what `next_step` gave.
            rows: list of `(piece, rows)`: variables, and int tensors without
                duplicates, of all rows that were updated.
        """
        step = self._sums.now + 1
        for piece, of_piece in rows:
            steps = tf.fill(tf.shape(of_piece), step)
            self._piece_of[id(piece.value)].steps.scatter_update(
                tf.IndexedSlices(steps, of_piece)
            )
        is_full = self._sums.extend(*numbers)
        tf.cond(is_full, self._settle, lambda: tf.constant(False))

    def _behind(self, steps):
        """Places of the steps of rows that are behind."""
        is_behind = (steps >= 0) & (steps < self._sums.now)
        return tf.where(is_behind)[:, 0]

    def _current(self, piece, ids, variable):
        """Rows of a variable that are behind, as they would be by now."""
        gap = self._sums.gap(tf.gather(piece.steps, ids), variable.dtype)
        kinds = {id(slot): kind for kind, slot in piece.slots.items()}
        if id(variable) in kinds:
            kind = kinds[id(variable)]
            slots = _stored(piece, self.form.needed_for(kind), ids)
            return self.form.slot_after(kind, slots, gap.factors.get(kind))
        slots = _stored(piece, piece.slots, ids)
        weights = tf.stop_gradient(stored_rows(piece.weights, ids))
        return self.form.moved(weights * gap.decay, slots, gap.sums)

    def _settle(self):
        was_writing, self.is_writing = self.is_writing, True
        try:
            for piece in self._pieces:
                self._settle_piece(piece)
            self._sums.reset()
        finally:
            self.is_writing = was_writing
        return tf.constant(True)

    def _settle_piece(self, piece):
        row_bytes = (
            math.prod(piece.weights.shape[1:]) * piece.weights.dtype.size
        )
        count = max(1, _BLOCK_BYTES // max(row_bytes, 1))
        count = min(count, piece.num_rows)

        def body(start):
            # Of a fixed length, as XLA asks: the last block begins earlier.
            first = tf.minimum(start, piece.num_rows - count)
            ids = first + tf.range(count, dtype=tf.int64)
            ids = tf.gather(ids, self._behind(tf.gather(piece.steps, ids)))
            variables = piece.weights, *piece.slots.values()
            rows = [self._current(piece, ids, v) for v in variables]
            for variable, of_variable in zip(variables, rows, strict=True):
                store_rows(variable, ids, of_variable)
            now = tf.fill(tf.shape(ids), self._sums.now)
            piece.steps.scatter_update(tf.IndexedSlices(now, ids))
            return (start + count,)

        tf.while_loop(
            lambda start: start < piece.num_rows,
            body,
            (tf.constant(0, tf.int64),),
            parallel_iterations=1,
        )
        piece.steps.assign(tf.minimum(piece.steps, 0))


def _stored(piece, kinds, ids):
    return {
        kind: tf.stop_gradient(stored_rows(piece.slots[kind], ids))
        for kind in kinds
    }


@tf.custom_gradient
def _with_gradient_of(rows, result):
    """A result whose gradient is that of the rows."""
    return tf.identity(result), lambda upstream: (upstream, None)


def keep(rule, pieces, slots, num_rows, are_zero):
    """Has the rows of a table kept, if the rule has a closed form.

    Args:
        rule, pieces, slots, num_rows, are_zero: as for `KeptRows`.

    Returns:
        None if they are; else why not.
    """
    storages = [piece.value for piece in pieces]
    if any(keeper_of(v) is not None for v in storages):
        return "another optimizer has trained it"
    if any(getattr(v, "is_traced", True) for v in storages):
        # Which would read rows that are behind.
        return (
            "a function that reads it was traced before the optimizer was "
            "built; call `optimizer.build(variables)` before"
        )
    forms = [closed_form_of(rule, piece) for piece in pieces]
    is_known = (
        forms[0] is not None
        and all(form == forms[0] for form in forms)
        and set(slots) == set(forms[0].factors)
    )
    of_slots = [slot.value for of_kind in slots.values() for slot in of_kind]
    if not is_known or not all(
        isinstance(make_current(slot), CurrentVariable) for slot in of_slots
    ):
        return "no closed form is known of its rule with these options"
    KeptRows(rule, forms[0], pieces, slots, num_rows, are_zero)
    return None


def kept_rows(variable, rule):
    """The `KeptRows` of a variable by a rule as it is now, or None."""
    keeper = keeper_of(variable.value)
    if keeper is None or keeper.rule is not rule:
        return None
    return keeper if keeper.form == closed_form_of(rule, variable) else None


class KeptUpdates:
    """The updates of kept rows in one step.

    Made before the rule is applied.

    Args:
        rows: list of `(kept, variable, rows)`: `KeptRows` or None, and the
            rows, without duplicates, that are updated of a variable.
    """

    def __init__(self, rows):
        self._rows = {}
        for kept, variable, of_variable in rows:
            if kept is not None:
                self._rows.setdefault(kept, []).append((variable, of_variable))
        self._numbers = {kept: kept.next_step() for kept in self._rows}

    @contextlib.contextmanager
    def storing(self):
        """While entered, the updated rows are stored."""
        try:
            for kept in self._rows:
                kept.is_writing = True
            yield
            for kept, rows in self._rows.items():
                kept.advance(self._numbers[kept], rows)
        finally:
            for kept in self._rows:
                kept.is_writing = False
