"""Rows as they will be after a step, against those after it, to the bit."""

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity._tf.current_variable import rows_after_step
from keras_sparsity.update import rules
from tests.rule_runs import DIM, ROWS, Table, made


def test_rows_before_a_step_are_those_after_it(monkeypatch):
    """Of a constraint, too: momentum makes weights negative until a step."""
    monkeypatch.setattr(rules, "_SMALL_ELEMENTS", 0)
    constraint = keras.constraints.NonNeg()
    table = Table(made("nesterov"), "float32", constraint=constraint)
    table.optimizer.learning_rate.assign(0.1)
    (piece,) = table.table.pieces
    touched, others = tf.range(6), tf.range(6, ROWS)

    @tf.function
    def step(ids, values):
        early = rows_after_step(piece.value, others)
        table.step(ids, values)
        return early

    random = np.random.default_rng(4)
    num_zeros = 0
    for number in range(20):
        # Odd steps touch the other rows, which may fall below 0 in the next.
        is_even = number % 2 == 0
        ids = (
            touched if is_even else tf.constant(random.permutation(others)[:6])
        )
        values = tf.constant(random.normal(size=(6, DIM)), tf.float32)
        early = step(tf.cast(ids, tf.int32), values)
        if is_even:
            found = tf.gather(table.table.variable, others)
            np.testing.assert_array_equal(early, found)
            num_zeros += np.count_nonzero(found == 0)
    assert num_zeros
