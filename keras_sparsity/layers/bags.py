"""The rows of several ids, combined into one vector."""

import tensorflow as tf

from keras_sparsity._tf import checks

COMBINERS = ("sum", "mean", "sqrtn")


def combined(inputs, weights, combiner, mask_zero, rows_of):
    """A vector for each bag of ids.

    Args:
        inputs, weights: as `ShardedEmbeddingBag` takes them.
        combiner: one of `COMBINERS`.
        mask_zero: whether id 0 is left out.
        rows_of: function from all ids, `(n,)`, to their rows `(n, dim)`.

    Returns:
        Tensor `(..., dim)`.
    """

    def vectors(ids, weights, sums):
        return _vectors(ids, weights, sums, combiner, mask_zero, rows_of)

    if isinstance(inputs, tf.RaggedTensor):
        return _of_ragged(inputs, _like(weights, tf.RaggedTensor), vectors)
    if isinstance(inputs, tf.SparseTensor):
        weights = _like(weights, tf.SparseTensor)
        return vectors(
            inputs.values,
            None if weights is None else weights.values,
            _sums_of(inputs.indices[:, 0], inputs.dense_shape[0]),
        )
    inputs = checks.tensor("inputs", inputs, "a tensor or array of ids")
    if weights is not None:
        weights = tf.reshape(weights, [-1])
    shape, last = tf.shape(inputs), inputs.shape.rank - 1

    def sums(values):
        # A sum over segments and its gradient, which looks for negative
        # ones in all that it gathers, are 66 operations more.
        each = tf.concat([shape, tf.shape(values)[1:]], axis=0)
        return tf.reduce_sum(tf.reshape(values, each), axis=last)

    found = vectors(tf.reshape(inputs, [-1]), weights, _in_32_bits(sums))
    return tf.ensure_shape(found, [*inputs.shape[:-1], None])


def _of_ragged(inputs, weights, vectors):
    if inputs.ragged_rank > 1:
        values = None if weights is None else weights.values
        return inputs.with_values(_of_ragged(inputs.values, values, vectors))
    return vectors(
        inputs.values,
        None if weights is None else weights.values,
        _sums_of(inputs.value_rowids(), inputs.nrows()),
    )


def _vectors(ids, weights, sums, combiner, mask_zero, rows_of):
    """Vectors of bags: from flat ids, weights and a sum over bags."""
    rows = rows_of(ids)
    if weights is not None:
        weights = tf.cast(weights, rows.dtype)
    if mask_zero:
        is_there = tf.cast(tf.not_equal(ids, 0), rows.dtype)
        weights = is_there if weights is None else weights * is_there
    if weights is None:
        vectors, weights = sums(rows), tf.ones_like(ids, rows.dtype)
    else:
        vectors = sums(rows * weights[:, tf.newaxis])
    vectors.set_shape([*[None] * (vectors.shape.rank - 1), rows.shape[-1]])
    if combiner == "sum":
        return vectors
    if combiner == "mean":
        divisors = sums(weights)
    else:
        squares = sums(tf.square(weights))
        is_some = squares > 0
        # Not of 0, where the root has no finite gradient.
        roots = tf.sqrt(tf.where(is_some, squares, tf.ones_like(squares)))
        divisors = tf.where(is_some, roots, tf.zeros_like(roots))
    return tf.math.divide_no_nan(vectors, divisors[..., tf.newaxis])


def _sums_of(bags, num_bags):
    """A function that sums values by bag, from the bag of each value."""
    return _in_32_bits(
        lambda values: tf.math.unsorted_segment_sum(values, bags, num_bags)
    )


def _in_32_bits(sums):
    """A function that sums values, with 16 bits in float32.

    TensorFlow adds them to 16 bits, where 256 + 1 may be 256.
    """

    def summed(values):
        if values.dtype.size > 2:
            return sums(values)
        return tf.cast(sums(tf.cast(values, tf.float32)), values.dtype)

    return summed


def _like(weights, kind):
    if weights is not None and not isinstance(weights, kind):
        raise ValueError(
            f"`weights` must be a tf.{kind.__name__}, as the ids are. "
            f"Received: weights={checks.spell(weights)} (of type "
            f"{type(weights).__name__})."
        )
    return weights
