"""Some rows of a table as they would be by now."""

import dataclasses
import functools

import tensorflow as tf

from keras_sparsity._tf import keras_optimizers, tf_graphs
from keras_sparsity._tf.current_variable import stored_rows
from keras_sparsity.exchange.ahead import is_same
from keras_sparsity.update.accumulate import RowAccumulator


@dataclasses.dataclass
class Piece:
    """A partition, or a whole table, of `KeptRows`.

    Attributes:
        weights: its `tf.Variable`.
        slots: dict from kinds of slots to `tf.Variable`s.
        steps: `tf.Variable`: the step of each row.
        accumulator: `RowAccumulator`, or None.
        pulled: list of `(graph, rows)`: the `CurrentRows` that the outermost
            function being traced has pulled, and the graph of each.
        pulled_in: the graph of that function.
    """

    weights: tf.Variable
    slots: dict
    steps: tf.Variable
    accumulator: RowAccumulator | None = None
    pulled: list = dataclasses.field(default_factory=list)
    pulled_in: tf.Graph | None = None

    @property
    def num_rows(self):
        return self.weights.shape[0]


class CurrentRows:
    """Some rows of a piece as they would be by now.

    `rows[variable]` are those of its weights or of a slot. Rows that are asked
    for are read and computed once.

    Args:
        kept: `KeptRows`.
        piece: its `Piece`.
        ids: int tensor `(n,)`, local rows without duplicates.
        coming: `Step` that is to be applied before; None: none.
    """

    def __init__(self, kept, piece, ids, coming=None):
        self.piece, self._kept, self.ids = piece, kept, ids
        steps, now = tf.gather(piece.steps, ids), kept.sums.checked_now()
        # No step has left a row behind that has none.
        steps = tf.where(steps < 0, now, steps)
        self._steps, self._now = steps, now
        dtype = piece.weights.dtype
        self._gap = kept.sums.gap(steps, now, dtype, coming)
        self._are_behind = steps < (now if coming is None else now + 1)
        self._slots = _StoredSlots(piece, ids)
        self._found = {}
        self._num_writes = kept.num_writes.read_value()

    def __getitem__(self, variable):
        if id(variable) not in self._found:
            self._found[id(variable)] = self._current(variable)
        return self._found[id(variable)]

    def are_still(self, ids):
        """Whether these are the rows, and none has been written since."""
        is_unwritten = self._num_writes == self._kept.num_writes.read_value()
        return is_unwritten & is_same(ids, tf.cast(self.ids, ids.dtype))

    def _current(self, variable):
        form, gap = self._kept.form, self._gap
        for kind, slot in self.piece.slots.items():
            if slot is not variable:
                continue
            if kind == keras_optimizers.AVERAGES:
                return self._average()
            return form.slot_after(kind, self._slots, gap.factors.get(kind))
        weights = self._weights
        if gap.decay is not None:
            weights = weights * gap.decay
        moved = form.moved(weights, self._slots, gap.sums)
        if form.is_non_negative:
            is_less = self._are_behind[:, None] & (moved < 0)
            moved = tf.where(is_less, tf.zeros_like(moved), moved)
        return moved

    def _average(self):
        kind, dtype = keras_optimizers.AVERAGES, self.piece.weights.dtype
        gap = self._kept.sums.average_gap(self._steps, self._now, dtype)
        weights = self._weights * gap.decay
        of_late_steps = self._kept.form.moved(weights, self._slots, gap.sums)
        return self._slots[kind] * gap.factors[kind] + of_late_steps

    @functools.cached_property
    def _weights(self):
        return tf.stop_gradient(stored_rows(self.piece.weights, self.ids))


class _StoredSlots(dict):
    """Rows of each kind of slot, read when first needed."""

    def __init__(self, piece, ids):
        super().__init__()
        self._slots, self._ids = piece.slots, ids

    def __missing__(self, kind):
        rows = stored_rows(self._slots[kind], self._ids)
        self[kind] = tf.stop_gradient(rows)
        return self[kind]


def note(rows):
    """Keeps the `CurrentRows` that a traced step has pulled.

    The piece keeps them, and not the graph, which stays until the model is
    freed (`custom_gradients`): the optimizer may refer to the model.
    """
    graph, outermost = tf_graphs.current(), tf_graphs.outermost_graph()
    if graph is None:
        return
    if rows.piece.pulled_in is not outermost:
        rows.piece.pulled, rows.piece.pulled_in = [], outermost
    rows.piece.pulled.append((graph, rows))


def noted(piece):
    """The `CurrentRows` of a piece that this graph has pulled last, or None."""
    graph = tf_graphs.current()
    for of_graph, rows in piece.pulled[::-1]:
        # A branch has tensors of its own.
        if of_graph is graph:
            return rows
    return None
