"""Sparsity-aware data-parallel training for Keras 3 on TensorFlow."""

from keras_sparsity._requirements import check_requirements

check_requirements()

from keras_sparsity import (  # noqa: E402
    callbacks,
    collectives,
    data,
    launch,
    layers,
    losses,
    moves,
    planning,
    sparsity,
)
from keras_sparsity._version import __version__ as __version__  # noqa: E402
from keras_sparsity.model_plan import plan  # noqa: E402
from keras_sparsity.optimizer import HybridOptimizer  # noqa: E402
from keras_sparsity.saving import export, shard_embeddings  # noqa: E402
from keras_sparsity.strategy import HybridStrategy  # noqa: E402
from keras_sparsity.tables.sharded_table import ShardedTable  # noqa: E402

__all__ = [
    "HybridOptimizer",
    "HybridStrategy",
    "ShardedTable",
    "callbacks",
    "collectives",
    "data",
    "export",
    "launch",
    "layers",
    "losses",
    "moves",
    "plan",
    "planning",
    "shard_embeddings",
    "sparsity",
]
