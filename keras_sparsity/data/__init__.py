"""Each rank's part of the input."""

from keras_sparsity.data.sharding import shard

__all__ = ["shard"]
