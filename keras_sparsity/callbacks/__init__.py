"""Callbacks for training over several processes."""

from keras_sparsity.callbacks.sharded_checkpoint import ShardedCheckpoint

__all__ = ["ShardedCheckpoint"]
