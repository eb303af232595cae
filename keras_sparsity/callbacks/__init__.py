"""Callbacks for training over several processes."""

from keras_sparsity.callbacks.architecture_logger import ArchitectureLogger
from keras_sparsity.callbacks.partition_search import PartitionSearch
from keras_sparsity.callbacks.sharded_checkpoint import ShardedCheckpoint

__all__ = ["ArchitectureLogger", "PartitionSearch", "ShardedCheckpoint"]
