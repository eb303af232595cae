"""The rows of several ids, combined into one vector."""

import keras
import tensorflow as tf

from keras_sparsity._tf import checks
from keras_sparsity.layers.sharded_embedding import ShardedEmbedding

COMBINERS = ("sum", "mean", "sqrtn")


@keras.saving.register_keras_serializable(package="keras_sparsity")
class ShardedEmbeddingBag(ShardedEmbedding):
    """A vector for each bag of ids: of the items of a basket, of tags.

    With rows x of the ids of a bag, and their weights w (1 by default),

        "sum"    sum of w x
        "mean"   sum of w x / sum of w
        "sqrtn"  sum of w x / square root of the sum of w^2

    and zeros for a bag that is empty, or whose divisor is 0.

    Args:
        input_dim, output_dim: as for `ShardedEmbedding`.
        combiner: one of the above.
        mask_zero: whether id 0 is padding, which is left out.
        **kwargs: the other arguments of `ShardedEmbedding`.

    Call arguments:
        inputs: ids: a dense tensor `(..., k)`, whose last axis is a bag, a
            `tf.RaggedTensor` whose innermost rows are, or a `tf.SparseTensor`
            `(n, k)`, as `tf.nn.embedding_lookup_sparse` takes it.
        weights: those of the ids, in a tensor of the same kind and shape, or
            None.

    Returns:
        Tensor `(..., output_dim)`.

    Raises:
        ValueError: if an argument has another type or value, or if `weights`
            are no tensor of the kind of `inputs`; else as `ShardedEmbedding`.
        tf.errors.InvalidArgumentError: as `ShardedEmbedding`.

    Example:

    >>> import numpy as np
    >>> bag = ShardedEmbeddingBag(
    ...     10, 4, combiner="sum", embeddings_initializer="ones")
    >>> bag(np.array([[1, 2, 2], [3, 4, 5]])).numpy()[0]
    array([3., 3., 3., 3.], dtype=float32)
    >>> bag(tf.ragged.constant([[1], [], [2, 3]])).numpy()[:, 0]
    array([1., 0., 2.], dtype=float32)

    References:
        EuroSys 3.1 (sparse variables); the combiners are those of
        `tf.nn.embedding_lookup_sparse`.
    """

    def __init__(self, input_dim, output_dim, combiner="mean", **kwargs):
        checks.check(
            isinstance(combiner, str) and combiner in COMBINERS,
            "combiner",
            combiner,
            f"one of {', '.join(map(repr, COMBINERS))}",
        )
        super().__init__(input_dim, output_dim, **kwargs)
        self.combiner = combiner

    def build(self, inputs_shape=None, weights_shape=None):
        super().build(inputs_shape)

    def call(self, inputs, weights=None, training=None):
        if isinstance(inputs, tf.RaggedTensor):
            return self._of_ragged(inputs, _like(weights, tf.RaggedTensor))
        if isinstance(inputs, tf.SparseTensor):
            weights = _like(weights, tf.SparseTensor)
            return self._combined(
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

        vectors = self._combined(tf.reshape(inputs, [-1]), weights, sums)
        return tf.ensure_shape(vectors, [*inputs.shape[:-1], self.output_dim])

    def _of_ragged(self, inputs, weights):
        if inputs.ragged_rank > 1:
            values = None if weights is None else weights.values
            return inputs.with_values(self._of_ragged(inputs.values, values))
        return self._combined(
            inputs.values,
            None if weights is None else weights.values,
            _sums_of(inputs.value_rowids(), inputs.nrows()),
        )

    def _combined(self, ids, weights, sums):
        """Vectors of bags: from flat ids, weights and a sum over bags."""
        rows = self._rows(ids)
        if weights is not None:
            weights = tf.cast(weights, rows.dtype)
        if self.mask_zero:
            is_there = tf.cast(tf.not_equal(ids, 0), rows.dtype)
            weights = is_there if weights is None else weights * is_there
        if weights is None:
            vectors, weights = sums(rows), tf.ones_like(ids, rows.dtype)
        else:
            vectors = sums(rows * weights[:, tf.newaxis])
        if self.combiner == "sum":
            return vectors
        if self.combiner == "mean":
            divisors = sums(weights)
        else:
            divisors = tf.sqrt(sums(tf.square(weights)))
        return tf.math.divide_no_nan(vectors, divisors[..., tf.newaxis])

    def _asked(self, inputs):
        if isinstance(inputs, tf.SparseTensor):
            return inputs.values
        return super()._asked(inputs)

    def compute_mask(self, inputs, mask=None):
        return None  # a bag is no step of a sequence

    def compute_output_shape(self, inputs_shape, weights_shape=None):
        return (*inputs_shape[:-1], self.output_dim)

    def compute_output_spec(self, inputs, weights=None, training=None):
        return keras.KerasTensor(
            self.compute_output_shape(inputs.shape), dtype=self.compute_dtype
        )

    def get_config(self):
        return {**super().get_config(), "combiner": self.combiner}


def _sums_of(bags, num_bags):
    """A function that sums values by bag, from the bag of each value."""
    return lambda values: tf.math.unsorted_segment_sum(values, bags, num_bags)


def _like(weights, kind):
    if weights is not None and not isinstance(weights, kind):
        raise ValueError(
            f"`weights` must be a tf.{kind.__name__}, as the ids are. "
            f"Received: weights={checks.spell(weights)} (of type "
            f"{type(weights).__name__})."
        )
    return weights
