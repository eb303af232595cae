"""`ShardedEmbedding` for bags of ids."""

import keras
import tensorflow as tf

from keras_sparsity._tf import checks
from keras_sparsity.layers.bags import COMBINERS, combined
from keras_sparsity.layers.sharded_embedding import ShardedEmbedding


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
        return combined(
            inputs, weights, self.combiner, self.mask_zero, self._rows
        )

    def _requests(self, inputs):
        if isinstance(inputs, tf.SparseTensor):
            inputs = inputs.values
        return super()._requests(inputs)

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
