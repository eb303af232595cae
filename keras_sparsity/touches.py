"""Counts, inside the step, which rows of a variable the ranks touch.

A touch is one rank needing one row in one step of training; a row that occurs
several times in a rank's part of the batch is touched once. All touches of a
row are counted where its gradients meet: at its owner, or, of a variable that
every rank has whole, on each rank alike. So counting sends nothing, and ranks
never wait for each other because of it.

Counting goes through all ids, so only some steps are sampled: the first ones,
and then every 16th. Of the others each pays one small read, one condition and
one small write for each variable. In memory stays one int32 for each row that
is counted here.
"""

import contextlib
import dataclasses

import numpy as np
import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity.collectives.engine import repeated
from keras_sparsity.own_variable import OwnVariable

# Steps sampled at the start, and the distance of those that follow. For each
# variable, on 2,560 ids, a sampled step takes 59 microseconds longer, another
# 9: 12 on average (benchmarks/sparsity.py).
_FIRST = 16
_EVERY = 16

# Set on a Keras variable that is counted.
_ATTRIBUTE = "_keras_sparsity_touches"

_left_out = []


@dataclasses.dataclass
class Reading:
    """What was counted of one variable, so far and on this rank.

    Attributes:
        num_steps: sampled steps.
        num_touches: of all ranks, on the rows that are counted here.
        num_together: the same, where what the ranks of one machine touch of a
            row in a step counts once.
        is_of_rank: whether only this rank's touches are in it.
        busiest: `(touches, rows)`, two arrays: how many of the busiest rows
            had each number of touches.
        largest_rows: of the rows that any rank asks of any other, the largest
            number, on average; 0 where the engine does not know it.
        num_asked: the rows that this rank has asked for, where a machine's
            ranks ask together, and touches are theirs; else 0.
    """

    num_steps: int
    num_touches: int
    num_together: int
    is_of_rank: bool
    busiest: tuple
    largest_rows: float
    num_asked: int


class Touches:
    """The counts of one variable.

    They belong to the traced functions that count into them. When the rows of
    a table move, `discard` it and trace the step anew.

    Args:
        num_rows: of the whole variable.
        machines: the machine of each rank.
        num_counted: number of rows that are counted here.
        position: function from row ids to their places among these.
    """

    def __init__(self, num_rows, machines, num_counted, position):
        self._num_rows = num_rows
        self._machines = machines
        self._num_counted = num_counted
        self._position = position
        self._is_of_rank = False
        # In one variable: steps to go until the next sample, sampled steps,
        # touches, touches of machines; notes, the rows of their largest parts,
        # and what this rank has asked for.
        self._state = OwnVariable([0] * 7, tf.int64)
        self._of_rows = OwnVariable(np.zeros(num_counted), tf.int32)
        # Touches of this step that came already, each as one number.
        self._arrived = OwnVariable([], tf.int64, [None])

    def note(self, asked):
        """Notes what an owner receives before the step ends.

        Args:
            asked: function without arguments that gives an int64 tensor of row
                ids; the rank that each comes from, or one that stands for its
                machine, if that asks for its ranks together; how many any rank
                receives of any other at most, where the engine knows it, else
                0; and the ids that this rank has asked for itself, if it is
                machines that ask, else None. Called where a step is sampled.
        """

        def keep():
            ids, ranks, largest, own_ids = asked()
            noted = [0, 0, 0, 0, 1, tf.cast(largest, tf.int64), 0]
            self._state.add(tf.stack(noted))
            touched = [self._arrived.read(), self._touched(ids, lambda: ranks)]
            if own_ids is not None:
                touched.append(self._touched(own_ids, self._nobody))
            touched = tf.concat(touched, axis=0)
            # Each once, so that it stays small where gradients are taken and
            # never applied.
            self._arrived.assign(tf.unique(touched)[0])
            return 0

        with tf.device("CPU:0"):
            state = self._state.read()
            tf.cond(tf.equal(state[0], 0), keep, lambda: 0)

    def end_step(self, ids=None, counts=None):
        """Counts a step, once on each rank.

        Args:
            ids: as for `note`, of a variable that all ranks have; by default
                those that `note` was given.
            counts: function without arguments that gives how many of each
                rank, called where a step is sampled; None if the ids are
                those of this rank alone.
        """
        self._is_of_rank = (
            ids is not None and counts is None and len(self._machines) > 1
        )

        def sample():
            if ids is None:
                touched = self._arrived.read()
                self._arrived.assign(tf.zeros([0], tf.int64))
            else:
                touched = self._touched(
                    ids, counts and (lambda: repeated(counts()))
                )
            # Of the variable itself TensorFlow would take the size, though
            # not the values, after it is empty again.
            self._count(tf.unique(touched)[0], state[1] + 1)
            return 0

        def skip():
            self._state.add([-1, 0, 0, 0, 0, 0, 0])
            return 0

        with tf.device("CPU:0"):
            state = self._state.read()
            tf.cond(tf.equal(state[0], 0), sample, skip)

    def _touched(self, ids, ranks):
        """Each touch as one number: row id + number of rows * rank."""
        ids = tf.cast(ids, tf.int64)
        is_inside = (ids >= 0) & (ids < self._num_rows)
        if ranks is not None:
            ids += tf.cast(ranks(), tf.int64) * self._num_rows
        # An id outside fails elsewhere, or is ignored there.
        return tf.boolean_mask(ids, is_inside)

    def _nobody(self):
        """Stands for a rank, of the rows that this one has asked for."""
        return len(self._machines)

    def _count(self, touched, num_steps):
        num_asked = tf.zeros([], tf.int64)
        if 1 < len(set(self._machines)) < len(self._machines):
            is_own = touched // self._num_rows >= self._nobody()
            num_asked = tf.math.count_nonzero(is_own)
            touched = tf.boolean_mask(touched, tf.logical_not(is_own))
        ids = touched % self._num_rows
        together = touched
        if len(set(self._machines)) < len(self._machines):
            machines = tf.constant(self._machines, tf.int64)
            machine = tf.gather(machines, touched // self._num_rows)
            together = tf.unique(machine * self._num_rows + ids)[0]
        self._of_rows.add_at(self._position(ids), 1)
        to_go = tf.where(num_steps < _FIRST, 0, _EVERY - 1)
        sizes = [tf.size(x, tf.int64) for x in (touched, together)]
        counted = [tf.cast(to_go, tf.int64), 1, *sizes, 0, 0, num_asked]
        self._state.add(tf.stack(counted))

    # Outside of the step.

    def read(self, num_busiest):
        """What was counted so far: `Reading`, with so many busiest rows."""
        _, num_steps, num_touches, num_together, num_notes, largest, asked = (
            self._state.numpy().tolist()
        )
        of_rows = self._of_rows.numpy()
        if num_busiest < len(of_rows):
            of_rows = np.partition(of_rows, -num_busiest)[-num_busiest:]
        busiest = np.unique(of_rows, return_counts=True)
        return Reading(
            num_steps,
            num_touches,
            num_together,
            self._is_of_rank,
            busiest,
            largest / num_notes if num_notes else 0.0,
            asked,
        )

    def reset(self):
        """Begins anew, with the first steps' samples."""
        self._state.assign(tf.zeros([7], tf.int64))
        self._of_rows.assign(tf.zeros([self._num_counted], tf.int32))
        self._arrived.assign(tf.zeros([0], tf.int64))


def of(variable):
    """The `Touches` of a Keras variable, made when it is first asked for.

    It is no state of the model: it is not among its variables, and neither
    saved nor restored.
    """
    found = existing(variable)
    if found is None:
        found = _new(variable)
        setattr(variable, _ATTRIBUTE, found)
    return found


def existing(variable):
    """The `Touches` of a Keras variable, or None."""
    return getattr(variable, _ATTRIBUTE, None)


def discard(variable):
    """Forgets what was counted; what is traced from now on counts anew."""
    if existing(variable) is not None:
        delattr(variable, _ATTRIBUTE)


@contextlib.contextmanager
def apart(variables):
    """While entered, what is traced counts apart from all that was before."""
    before = [(v, existing(v)) for v in variables]
    for variable in variables:
        discard(variable)
    try:
        yield
    finally:
        for variable, counts in before:
            discard(variable)
            if counts is not None:
                setattr(variable, _ATTRIBUTE, counts)


def note(variable, asked):
    """`Touches.note`, unless it is left out."""
    if not _left_out:
        of(variable).note(asked)


def end_step(variable, ids=None, counts=None):
    """`Touches.end_step`, unless it is left out."""
    if not _left_out:
        of(variable).end_step(ids, counts)


@contextlib.contextmanager
def left_out():
    """While entered, what is traced does not count: to time it without."""
    _left_out.append(True)
    try:
        yield
    finally:
        _left_out.pop()


def _new(variable):
    table = getattr(variable, "table", None)
    if table is None or not table.is_sharded:
        num_rows = variable.shape[0]
        machines = collectives.current().machines
        return Touches(num_rows, machines, num_rows, lambda ids: ids)
    layout, ranks = table.layout, table.collectives
    stored = layout.num_stored_rows()
    start = sum(stored[: ranks.rank])
    return Touches(
        table.num_rows,
        ranks.machines,
        stored[ranks.rank],
        lambda ids: layout.stored_position(ids) - start,
    )
