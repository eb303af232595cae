"""Distributed training for Keras 3 on TensorFlow, variable by variable."""

import os
import sys

from keras_sparsity._version import __version__ as __version__


def _is_command():
    """Whether this process is the command `keras-sparsity`.

    It starts others, trains nothing, and needs none of what follows: the
    import of TensorFlow takes seconds.
    """
    (first,) = sys.argv[:1] or [""]
    if first != "-m":
        return os.path.basename(first) == "keras-sparsity"
    # While `python -m` looks for the module, in the working folder first: its
    # modules are the program's, not the launcher's.
    ways = {"keras_sparsity.launch", "-mkeras_sparsity.launch"}
    is_command = not ways.isdisjoint(sys.orig_argv)
    if is_command and not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    return is_command


if not _is_command():
    from keras_sparsity._tf.requirements import check_requirements

    check_requirements()

    from keras_sparsity import (
        callbacks,
        collectives,
        data,
        launch,
        layers,
        moves,
        planning,
        sparsity,
    )
    from keras_sparsity.conversion.exporting import export
    from keras_sparsity.conversion.sharding import shard_embeddings
    from keras_sparsity.global_batch import losses
    from keras_sparsity.global_batch.gathering import gather_batch
    from keras_sparsity.optimizer import HybridOptimizer
    from keras_sparsity.pipeline.layer_placement import LayerPlacementStrategy
    from keras_sparsity.pipeline.strategy import PipelineStrategy
    from keras_sparsity.planner import plan
    from keras_sparsity.strategy import HybridStrategy
    from keras_sparsity.tables.sharded_table import ShardedTable

__all__ = [
    "HybridOptimizer",
    "HybridStrategy",
    "LayerPlacementStrategy",
    "PipelineStrategy",
    "ShardedTable",
    "callbacks",
    "collectives",
    "data",
    "export",
    "gather_batch",
    "launch",
    "layers",
    "losses",
    "moves",
    "plan",
    "planning",
    "shard_embeddings",
    "sparsity",
]
