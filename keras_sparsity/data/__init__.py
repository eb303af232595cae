"""Each rank's part of the input."""

from keras_sparsity.data.batches import split_batch
from keras_sparsity.data.distribution import (
    distribute,
    is_sharded,
    mark_as_part,
    next_order_seed,
    shard,
    split_batches,
)

__all__ = [
    "distribute",
    "is_sharded",
    "mark_as_part",
    "next_order_seed",
    "shard",
    "split_batch",
    "split_batches",
]
