"""A right call of each public function, class and method."""

import inspect

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from tests import launch_functions

ROWS, DIM = 4, 2


def variable():
    return keras.Variable(np.zeros(3, "float32"), name="kernel")


def current():
    return ks.collectives.current()


def batches():
    return tf.data.Dataset.range(4).batch(2)


def model():
    layers = [keras.Input((3,)), ks.layers.ShardedEmbedding(ROWS, DIM)]
    return keras.Sequential(layers)


def compiled():
    made = model()
    made.compile("sgd", "mse")
    return made


def optimizer(**options):
    return ks.HybridOptimizer("sgd", **options)


def table(**options):
    return ks.ShardedTable(ROWS, DIM, **options)


def collection():
    table = ks.layers.ShardedEmbedding(ROWS, DIM)
    return ks.layers.ShardedEmbeddingCollection(
        {"a": table, "b": table}, {"b": "sum"}
    )


def move(to, function=ks.moves.move, name="moves"):
    moved = model()
    moves = {moved.layers[0].table: to}
    return function, {"model": moved, name: moves}


def route():
    return current().all_to_all(tf.zeros(2), [2])[1]


def spec(**options):
    options = {"name": "table", "shape": (ROWS, DIM), "alpha": 0.5, **options}
    return ks.planning.VariableSpec(**options)


def sampler():
    sampler = ks.planning.PartitionSampler(size=2)
    sampler.record(1, 0.1)
    return sampler


def dense_spec():
    return spec(alpha=None)


def machines():
    return ks.planning.Cluster(2, 2)


def apply(**arguments):
    optimizer().apply(**arguments)


class Unpicklable:
    def __reduce__(self):
        raise TypeError("it holds a lock")


# For each public callable: itself and arguments that are right, made when they
# are needed.
VALID = {
    "HybridStrategy": lambda: (ks.HybridStrategy, {}),
    "HybridStrategy.shard": lambda: (
        ks.HybridStrategy().shard,
        {"dataset": batches()},
    ),
    "PipelineStrategy": lambda: (ks.PipelineStrategy, {}),
    "LayerPlacementStrategy": lambda: (ks.LayerPlacementStrategy, {}),
    "HybridOptimizer": lambda: (
        ks.HybridOptimizer,
        {"inner_optimizer": "sgd"},
    ),
    "HybridOptimizer.apply": lambda: (
        apply,
        {"grads": [tf.zeros(3)], "trainable_variables": [variable()]},
    ),
    "HybridOptimizer.build": lambda: (
        optimizer().build,
        {"var_list": [variable()]},
    ),
    "ShardedTable": lambda: (ks.ShardedTable, {"num_rows": 4, "dim": 2}),
    "ShardedTable.gather": lambda: (table().gather, {"ids": [1, 1]}),
    "ShardedTable.assign": lambda: (
        table().assign,
        {"whole": np.zeros((ROWS, DIM))},
    ),
    "export": lambda: (ks.export, {"model": model()}),
    "shard_embeddings": lambda: (ks.shard_embeddings, {"model": model()}),
    "callbacks.PartitionSearch": lambda: (ks.callbacks.PartitionSearch, {}),
    "callbacks.ShardedCheckpoint": lambda: (
        ks.callbacks.ShardedCheckpoint,
        {"directory": "checkpoints"},
    ),
    "callbacks.ShardedCheckpoint.restore": lambda: (
        ks.callbacks.ShardedCheckpoint("checkpoints").restore,
        {"model": model()},
    ),
    "collectives.Collectives.all_reduce": lambda: (
        current().all_reduce,
        {"tensors": [tf.zeros(2)]},
    ),
    "collectives.Collectives.all_to_all": lambda: (
        current().all_to_all,
        {"tensor": tf.zeros(2), "splits": [2]},
    ),
    "collectives.Collectives.all_to_all_along": lambda: (
        current().all_to_all_along,
        {"tensor": tf.zeros(2), "route": route()},
    ),
    "collectives.Collectives.all_to_all_back": lambda: (
        current().all_to_all_back,
        {"tensor": tf.zeros(2), "route": route()},
    ),
    "collectives.Collectives.all_gather": lambda: (
        current().all_gather,
        {"tensor": tf.zeros(2)},
    ),
    "collectives.Collectives.broadcast": lambda: (
        current().broadcast,
        {"tensors": [tf.zeros(2)]},
    ),
    "collectives.Collectives.barrier": lambda: (current().barrier, {}),
    "collectives.Collectives.gather_objects": lambda: (
        current().gather_objects,
        {"value": {"any": 1}},
    ),
    "collectives.Collectives.check_equal": lambda: (
        current().check_equal,
        {"value": 1, "what": "It"},
    ),
    "collectives.Collectives.group": lambda: (
        current().group,
        {"name": "machine"},
    ),
    "collectives.Topology": lambda: (ks.collectives.Topology, {}),
    "collectives.start": lambda: (ks.collectives.start, {}),
    "gather_batch": lambda: (ks.gather_batch, {"x": np.ones((2, 3))}),
    "data.shard": lambda: (
        ks.data.shard,
        {"dataset": batches(), "collectives": current()},
    ),
    "losses.globalize": lambda: (ks.losses.globalize, {"loss": "mse"}),
    "losses.GlobalMean": lambda: (ks.losses.GlobalMean, {"loss": "mse"}),
    "launch.run": lambda: (
        ks.launch.run,
        {"function": launch_functions.describe, "num_processes": 1},
    ),
    "plan": lambda: (
        ks.plan,
        {
            "model": compiled(),
            "dataset": tf.data.Dataset.from_tensors(
                (np.zeros((2, 3), "int32"), np.zeros((2, 3, DIM)))
            ),
        },
    ),
    "planning.Cluster": lambda: (ks.planning.Cluster, {}),
    "planning.PartitionChoice.predicted_seconds": lambda: (
        sampler().choice().predicted_seconds,
        {"num_partitions": 3},
    ),
    "planning.PartitionSampler": lambda: (
        ks.planning.PartitionSampler,
        {"size": 2},
    ),
    "planning.PartitionSampler.record": lambda: (
        sampler().record,
        {"num_partitions": 2, "seconds": 0.1},
    ),
    "planning.VariableSpec": lambda: (spec, {}),
    "planning.VariableSpec.num_bytes": lambda: (spec().num_bytes, {}),
    "planning.alpha_model": lambda: (
        ks.planning.alpha_model,
        {"variables": [spec(), dense_spec()]},
    ),
    "moves.move": lambda: move("allreduce"),
    "moves.repartition": lambda: move(3, ks.moves.repartition, "partitions"),
    "sparsity.measured": lambda: (ks.sparsity.measured, {"model": model()}),
    "sparsity.popularity": lambda: (
        ks.sparsity.popularity,
        {"model": model()},
    ),
    "sparsity.reset": lambda: (ks.sparsity.reset, {"model": model()}),
    "sparsity.VariableSparsity.spec": lambda: (
        ks.sparsity.VariableSparsity("table", (8, 2), "float32", 0.5).spec,
        {},
    ),
    "planning.plan": lambda: (
        ks.planning.plan,
        {"variables": [spec(), dense_spec()], "cluster": machines()},
    ),
    "callbacks.ArchitectureLogger": lambda: (
        ks.callbacks.ArchitectureLogger,
        {"log_dir": "logs"},
    ),
    "planning.engine_bytes": lambda: (
        ks.planning.engine_bytes,
        {
            "variable": spec(),
            "architecture": "ps",
            "cluster": machines(),
            "engine": "native",
        },
    ),
    "planning.sharded_table_bytes": lambda: (
        ks.planning.sharded_table_bytes,
        {"variable": spec(), "cluster": machines()},
    ),
    "planning.transfer_bytes": lambda: (
        ks.planning.transfer_bytes,
        {"variable": spec(), "architecture": "ps", "cluster": machines()},
    ),
    "layers.ShardedEmbedding": lambda: (
        ks.layers.ShardedEmbedding,
        {"input_dim": ROWS, "output_dim": DIM},
    ),
    "layers.ShardedEmbeddingBag": lambda: (
        ks.layers.ShardedEmbeddingBag,
        {"input_dim": ROWS, "output_dim": DIM},
    ),
    "layers.ShardedEmbeddingBag.call": lambda: (
        ks.layers.ShardedEmbeddingBag(ROWS, DIM),
        {"inputs": np.array([1])},
    ),
    "layers.ShardedEmbedding.call": lambda: (
        ks.layers.ShardedEmbedding(ROWS, DIM),
        {"inputs": np.array([1])},
    ),
    "layers.ShardedEmbeddingCollection": lambda: (
        ks.layers.ShardedEmbeddingCollection,
        {"features": {"a": ks.layers.ShardedEmbedding(ROWS, DIM)}},
    ),
    "layers.ShardedEmbeddingCollection.call": lambda: (
        collection(),
        {"inputs": {"a": np.array([1]), "b": np.array([[1, 2]])}},
    ),
    "layers.SampledSoftmax": lambda: (
        ks.layers.SampledSoftmax,
        {"num_classes": 9, "num_sampled": 3},
    ),
    "layers.SampledSoftmax.call": lambda: (
        ks.layers.SampledSoftmax(9, 3),
        {"inputs": np.zeros((2, 3), "float32")},
    ),
    "layers.SampledSoftmax.loss": lambda: (
        ks.layers.SampledSoftmax(9, 3).loss,
        {},
    ),
}

# Arguments for which any value is valid.
ANY_VALUE = {
    "HybridOptimizer.kwargs": "none is taken: see learning_rate",
    "collectives.Collectives.check_equal.value": "compared by its `repr`",
    "collectives.Collectives.check_equal.what": "only shown",
    "collectives.Collectives.check_equal.fix": "only shown",
    "layers.ShardedEmbedding.call.training": "a truth value",
    "layers.SampledSoftmax.call.training": "a truth value",
}


def public_callables():
    """Functions, classes and the methods that are their own, by name."""
    found = {}
    for name in ks.__all__:
        value = getattr(ks, name)
        if inspect.ismodule(value):
            for inner in value.__all__:
                found[f"{name}.{inner}"] = getattr(value, inner)
        else:
            found[name] = value
    for name, value in list(found.items()):
        if inspect.isclass(value):
            bases = value.__mro__[1:]
            for method, function in vars(value).items():
                is_own = not any(hasattr(base, method) for base in bases)
                is_public = not method.startswith("_")
                if is_public and is_own and inspect.isfunction(function):
                    found[f"{name}.{method}"] = function
    return found


def parameters(function):
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    signature = inspect.signature(function)
    return {
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind not in kinds and name != "self"
    }
