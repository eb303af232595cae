"""Keras layers over sharded tables."""

from keras_sparsity.layers.sampled_softmax import SampledSoftmax
from keras_sparsity.layers.sharded_embedding import ShardedEmbedding
from keras_sparsity.layers.sharded_embedding_bag import ShardedEmbeddingBag
from keras_sparsity.layers.sharded_embedding_collection import (
    ShardedEmbeddingCollection,
)

__all__ = [
    "SampledSoftmax",
    "ShardedEmbedding",
    "ShardedEmbeddingBag",
    "ShardedEmbeddingCollection",
]
