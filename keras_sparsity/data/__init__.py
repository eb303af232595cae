"""Each rank's part of the input."""

from keras_sparsity.data.distribution import shard

__all__ = ["shard"]
