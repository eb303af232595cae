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
import itertools

import numpy as np
import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity._tf import contexts
from keras_sparsity._tf.own_variable import OwnVariable
from keras_sparsity.collectives.engine import repeated

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
    """The counts of one variable, so far and on this rank.

    Attributes:
        num_steps: sampled steps.
        num_touches: of all ranks, on the rows that are counted here.
        num_together: the same, where the touches of a row by the ranks of one
            machine in a step count once.
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

    Attributes:
        state: `OwnVariable`, int64 `(7,)`; its first number is 0 where this
            step is sampled.
    """

    def __init__(self, num_rows, machines, num_counted):
        self._num_rows = num_rows
        self._machines = machines
        self._num_counted = num_counted
        self._is_of_rank = False
        # In one variable: steps to go until the next sample, sampled steps,
        # touches, touches of machines; notes, the rows of their largest parts,
        # and the rows that this rank has asked for.
        self.state = OwnVariable([0] * 7, tf.int64)
        self._of_rows = OwnVariable(np.zeros(num_counted), tf.int32)
        # Touches of this step that came already, each as one number.
        self._arrived = OwnVariable([], tf.int64, [None])

    def keep(self, is_due, ids, ranks, largest, own_ids):
        """Keeps the ids that an owner receives until the step ends, see `note`.

        Args:
            is_due: whether this variable's step is sampled.
        """
        due = tf.cast(is_due, tf.int64)
        noted = [0, 0, 0, 0, due, due * tf.cast(largest, tf.int64), 0]
        self.state.add(tf.stack(noted))
        touched = [self._arrived.read(), self._numbers(ids, ranks)]
        if own_ids is not None:
            touched.append(self._numbers(own_ids, self._nobody()))
        # Each once, so that it stays small where gradients are taken and
        # never applied.
        touched = tf.unique(tf.concat(touched, axis=0))[0]
        num_kept = tf.where(is_due, tf.size(touched), 0)
        self._arrived.assign(touched[:num_kept])

    def end(self, is_due, ids, counts):
        """Ends a step that may be sampled, see `end_step`.

        Args:
            is_due: whether this variable's step is sampled.
        """
        self._is_of_rank = (
            ids is not None and counts is None and len(self._machines) > 1
        )
        if ids is None:
            touched = self._arrived.read()
            self._arrived.assign(tf.zeros([0], tf.int64))
        else:
            ids = tf.cast(ids, tf.int64)
            # An id outside fails elsewhere, or is ignored there.
            is_inside = (ids >= 0) & (ids < self._num_rows)
            touched = tf.boolean_mask(
                self._numbers(ids, repeated(counts()) if counts else None),
                is_inside & is_due,
            )
        # Of the variable itself TensorFlow would take the size, though not
        # the values, after it is empty again.
        self._count(is_due, tf.unique(touched)[0])

    def _numbers(self, ids, ranks):
        """Each touch as one number: row + number of rows * rank."""
        ids = tf.cast(ids, tf.int64)
        if ranks is None:
            return ids
        return ids + tf.cast(ranks, tf.int64) * self._num_rows

    def _nobody(self):
        """Stands for a rank, of the rows that this one has asked for."""
        return len(self._machines)

    def _count(self, is_due, touched):
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
        self._of_rows.add_at(ids, 1)
        to_go = tf.where(self.state.read()[1] + 1 < _FIRST, 0, _EVERY - 1)
        to_go = tf.cast(tf.where(is_due, to_go, -1), tf.int64)
        sizes = [tf.size(x, tf.int64) for x in (touched, together)]
        due = tf.cast(is_due, tf.int64)
        self.state.add(tf.stack([to_go, due, *sizes, 0, 0, num_asked]))

    # Outside of the step.

    def read(self, num_busiest):
        """The counts so far: `Reading`, with so many busiest rows."""
        _, num_steps, num_touches, num_together, num_notes, largest, asked = (
            self.state.numpy().tolist()
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
        self.state.assign(tf.zeros([7], tf.int64))
        self._of_rows.assign(tf.zeros([self._num_counted], tf.int32))
        self._arrived.assign(tf.zeros([0], tf.int64))


def of(variable):
    """The `Touches` of a Keras variable, made when it is first asked for.

    It is no state of the model: it is not among its variables, and neither
    saved nor restored.
    """
    if not hasattr(variable, _ATTRIBUTE):
        setattr(variable, _ATTRIBUTE, _new(variable))
    return getattr(variable, _ATTRIBUTE)


def existing(variable):
    """The `Touches` of a Keras variable, or None."""
    return getattr(variable, _ATTRIBUTE, None)


def discard(variable):
    """Forgets all counts; functions traced from now on count anew."""
    if existing(variable) is not None:
        delattr(variable, _ATTRIBUTE)


@contextlib.contextmanager
def apart(variables):
    """While entered, traced functions count apart from all earlier ones."""
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


def note(variables, asked):
    """Notes the addresses that an owner receives before the step ends.

    Args:
        variables: list of their variables.
        asked: function without arguments that gives a tuple for each of them:
            places among the rows of the table that this rank stores; the
            rank that each comes from, or one that stands for its machine, if
            that asks for its ranks together; how many any rank receives of any
            other at most, where the engine knows it, else 0; and the ids that
            this rank has asked for itself, if it is machines that ask, else
            None. Called where a step is sampled.
    """
    # No update ends the step of a frozen one, such as a tied kernel beside a
    # trained bias: its addresses would be kept for ever.
    are_counted = [variable.trainable for variable in variables]
    if _left_out or not any(are_counted):
        return
    counts = [of(v) for v in itertools.compress(variables, are_counted)]
    with tf.device("CPU:0"):
        due = _due(counts)

        def keep():
            noted_of = itertools.compress(asked(), are_counted)
            for of_variable, is_due, noted in zip(
                counts, tf.unstack(due), noted_of, strict=True
            ):
                of_variable.keep(is_due, *noted)
            return 0

        tf.cond(tf.reduce_any(due), keep, lambda: 0)


def end_step(ended):
    """Counts a step, once on each rank.

    Args:
        ended: list of `(variable, ids, counts)`: row ids of a variable that
            all ranks have, None of one of which they were given to `note`;
            and a function without arguments that gives how many are of each
            rank, called where a step is sampled, or None if the ids are those
            of this rank alone.
    """
    if _left_out or not ended:
        return
    counts = [of(variable) for variable, *_ in ended]
    with tf.device("CPU:0"):
        due = _due(counts)

        def end():
            for of_variable, is_due, (_, *touched) in zip(
                counts, tf.unstack(due), ended, strict=True
            ):
                of_variable.end(is_due, *touched)
            return 0

        def skip():
            for of_variable in counts:
                of_variable.state.add([-1, 0, 0, 0, 0, 0, 0])
            return 0

        tf.cond(tf.reduce_any(due), end, skip)


def _due(counts):
    """Whether the step of each of some `Touches` is sampled: a bool tensor.

    As one, for one condition: they are mostly sampled together.
    """
    states = tf.stack([each.state.read() for each in counts])
    return tf.equal(states[:, 0], 0)


def left_out():
    """While entered, traced functions count nothing, for comparisons."""
    return contexts.on_top(_left_out, True)


def _new(variable):
    table = getattr(variable, "table", None)
    if table is None or not table.is_sharded:
        num_rows = variable.shape[0]
        machines = collectives.current().machines
        return Touches(num_rows, machines, num_rows)
    ranks = table.collectives
    num_stored = table.layout.num_stored_rows(ranks.rank)
    return Touches(table.num_rows, ranks.machines, num_stored)
