"""Rows that shrink in each step, against those that are shrunk in each."""

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.stages.decaying import DecayingRows

_FACTOR, _NUM_ROWS = 0.75, 7


@pytest.fixture
def variable():
    values = np.arange(2.0 * _NUM_ROWS).reshape(_NUM_ROWS, 2)
    return tf.Variable(values, trainable=False)


def _step(keeper, variable, expected, ids):
    """Doubles some rows; shrinks the others."""
    rows = 2 * tf.gather(variable, ids)
    keeper.advance(ids, rows)
    written = 2 * expected[ids]
    expected *= _FACTOR
    expected[ids] = written


@pytest.mark.parametrize("settles", [False, True])
def test_as_all_rows_in_each_step(variable, settles):
    expected = variable.numpy()
    keeper = DecayingRows(variable, _FACTOR)
    for ids in ([0, 3], [3], [], [5, 0], [1]):
        _step(keeper, variable, expected, np.array(ids, np.int32))
        for read in (variable.numpy(), tf.gather(variable, range(_NUM_ROWS))):
            np.testing.assert_allclose(read, expected, rtol=1e-14)
        if settles:
            keeper.settle()
    np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-14)


def test_values_from_outside_are_up_to_date(variable):
    keeper = DecayingRows(variable, _FACTOR)
    expected = variable.numpy()
    _step(keeper, variable, expected, np.array([2], np.int32))
    given = np.ones((_NUM_ROWS, 2))
    variable.assign(given)
    np.testing.assert_array_equal(variable.numpy(), given)
    _step(keeper, variable, given, np.array([4], np.int32))
    np.testing.assert_allclose(variable.numpy(), given, rtol=1e-14)
