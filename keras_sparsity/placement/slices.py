"""Gradients of rows: `tf.IndexedSlices`, merged, changed or made dense."""

import tensorflow as tf


def merged(gradient):
    """Sums duplicate rows: each row occurs once. Others are as they are."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, index = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, index, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def mapped(function, gradient):
    """A gradient, of rows or dense, whose values a function has changed."""
    if not isinstance(gradient, tf.IndexedSlices):
        return function(gradient)
    values = function(gradient.values)
    return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)


def dense(slices, num_rows):
    """The gradient of all rows: `(num_rows, ...)`."""
    return tf.math.unsorted_segment_sum(slices.values, slices.indices, num_rows)


def counts(slices, num_rows):
    """How often each row has a gradient: `(num_rows,)`."""
    ones = tf.ones_like(slices.indices, slices.values.dtype)
    return tf.math.unsorted_segment_sum(ones, slices.indices, num_rows)


def touched(gradient, counts):
    """The touched rows of a dense gradient, as `tf.IndexedSlices`."""
    rows = tf.where(counts > 0)[:, 0]
    shape = tf.shape(gradient, tf.int64)
    return tf.IndexedSlices(tf.gather(gradient, rows), rows, shape)
