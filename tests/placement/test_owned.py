"""Gradients of the rows that a rank owns."""

import keras
import pytest
import tensorflow as tf

from keras_sparsity.placement.base import Update
from keras_sparsity.placement.owned import Owners


def test_rows_stay_and_other_gradients_are_refused():
    rows = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([0, 4]))
    update = Update(None, rows, None, is_of_rows=True)
    Owners.reduce([update], None, None)
    assert update.gradient is rows
    table = keras.Variable(tf.zeros([5, 3]), name="of_table")
    dense = Update(table, tf.ones([5, 3]), table)
    with pytest.raises(ValueError, match="(?s)of_table.*tf.IndexedSlices"):
        Owners.reduce([update, dense], None, None)
