"""Gradients of rows, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.placement import slices

ROWS, DIM = 7, 2


def gradient(ids):
    values = np.random.default_rng(5).normal(size=(len(ids), DIM))
    dense = np.zeros((ROWS, DIM))
    np.add.at(dense, ids, values)
    ids = tf.constant(ids, tf.int64)
    shape = tf.constant([ROWS, DIM], tf.int64)
    return tf.IndexedSlices(tf.constant(values), ids, shape), dense


IDS = pytest.mark.parametrize("ids", [[], [3], [2, 2], [6, 0, 6, 3, 6]])


@IDS
def test_duplicate_rows_are_summed(ids):
    rows, dense = gradient(ids)
    merged = slices.merged(rows)
    found = merged.indices.numpy()
    assert sorted(found) == sorted(set(ids))
    np.testing.assert_allclose(merged.values, dense[found])


def test_a_dense_gradient_is_merged_as_it_is():
    dense = tf.ones([ROWS, DIM])
    assert slices.merged(dense) is dense
    assert slices.merged(None) is None


@IDS
def test_values_are_changed(ids):
    rows, dense = gradient(ids)
    changed = slices.mapped(lambda values: 2 * values, rows)
    assert changed.indices is rows.indices
    assert changed.dense_shape is rows.dense_shape
    np.testing.assert_array_equal(changed.values, 2 * rows.values)
    changed = slices.mapped(lambda values: 2 * values, tf.constant(dense))
    np.testing.assert_array_equal(changed, 2 * dense)


@IDS
def test_the_dense_gradient(ids):
    rows, dense = gradient(ids)
    np.testing.assert_allclose(slices.dense(rows, ROWS), dense)


@IDS
def test_touched_rows_of_the_dense_gradient(ids):
    rows, dense = gradient(ids)
    # The shape of all may not be given.
    rows = tf.IndexedSlices(rows.values, rows.indices)
    counts = slices.counts(rows, ROWS)
    np.testing.assert_array_equal(counts, np.bincount(ids, minlength=ROWS))
    touched = slices.touched(tf.constant(dense), counts)
    np.testing.assert_array_equal(touched.indices, np.unique(ids))
    np.testing.assert_allclose(touched.values, dense[touched.indices])
