"""Every argument of the public API, wrong: one error that says what to do.

`BAD` is the table; the tests after it see that no argument is left out.
"""

import inspect
import pathlib
import re
import signal

import keras
import numpy as np
import pytest
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

SGD = keras.optimizers.SGD
INTEGER = "must be a positive integer.*Received: "
PARTITIONS = f"{INTEGER}num_partitions="
KERAS_DTYPE = "[Pp]olicy|dtype"
NO_TENSOR = "received {}.*Expected a tensor.*gather_objects"
NAME = "`name` must be a string.*the same on all ranks.*Received: name=3"

# A table of no model.
OTHER = table()

# Callable, wrong arguments, what the message says; a TypeError where it says
# so, else a ValueError.
BAD = [
    # How a model is distributed.
    *(
        (name, arguments, message)
        for name in ("HybridStrategy", "HybridOptimizer")
        for arguments, message in [
            ({"sparse_updates": "fast"}, "'exact' or 'lazy'.*='fast'"),
            ({"sparse_updates": None}, "'exact' or 'lazy'.*=None"),
            ({"dense_aggregation": "max"}, "'mean' or 'sum'.*='max'"),
            ({"sparse_aggregation": 2}, "'mean' or 'sum'.*=2"),
            (
                {"transform_gradients": 3},
                "function of a list of gradients.*Received: transform_.*=3",
            ),
        ]
    ),
    ("HybridStrategy", {"engine": "mpi"}, "one of.*'native'.*engine='mpi'"),
    ("HybridStrategy", {"engine": 3}, "must be one of.*'native'.*engine=3"),
    (
        "HybridStrategy.shard",
        {"dataset": [1, 2]},
        r"TypeError: Expected a `tf.data.Dataset`.*Received: \[1, 2\]",
    ),
    (
        "HybridStrategy.shard",
        {"dataset": tf.data.Dataset.range(3)},
        r"scalars.*Batch it first: `dataset.batch",
    ),
    *(
        (
            "HybridOptimizer",
            {"inner_optimizer": wrong},
            "must be a Keras optimizer, its name.*Received: inner_opt",
        )
        for wrong in (None, 3, "adamm", SGD, {"a": 1})
    ),
    (
        "HybridOptimizer",
        {"inner_optimizer": ks.HybridOptimizer("sgd")},
        "already. Pass the optimizer inside it. Received",
    ),
    ("HybridOptimizer", {"name": 3}, "must be a string.*Received: name=3"),
    (
        "HybridOptimizer",
        {"clipnorm": 1.0},
        "no arguments.*clipnorm.*set them on the inner",
    ),
    (
        "HybridOptimizer",
        {"learning_rate": 1.0},
        "no arguments.*learning_rate.*set them on the inner",
    ),
    *(
        ("HybridOptimizer.apply", {"grads": wrong}, message)
        for wrong, message in [
            (3, "must be a list of gradients.*Received: grads=3"),
            (tf.zeros(3), "must be a list of gradients.*Received: grads="),
            (["a"], "tensors or tf.IndexedSlices.*Received: grads='a'"),
            ([tf.zeros(3, tf.int32)], "floating-point tensors.*int32"),
            (
                [tf.zeros(2)],
                r"shape \(2,\) for kernel. Expected: \(3,\).*order",
            ),
            ([tf.zeros(3)] * 2, "2 gradients and 1 variables"),
            ([None], "No gradients provided"),
        ]
    ),
    *(
        (name, {argument: wrong}, "list of variables.*trainable_variables`")
        for name, argument in (
            ("HybridOptimizer.apply", "trainable_variables"),
            ("HybridOptimizer.build", "var_list"),
        )
        for wrong in (3, [3], tf.zeros(3))
    ),
    # The search for a number of partitions.
    *(
        ("planning.PartitionSampler", arguments, message)
        for arguments, message in [
            ({"size": 0}, "a positive integer.*size=0"),
            ({"start": 1.5}, "a positive integer.*start=1.5"),
            ({"max_samples": -1}, "a positive integer.*max_samples=-1"),
            ({"allowed": [1, 2]}, "a function.*Received: allowed="),
            ({"allowed": lambda count: False}, "`start` must be an allowed"),
        ]
    ),
    *(
        ("planning.PartitionSampler.record", arguments, message)
        for arguments, message in [
            ({"num_partitions": 0}, "a positive integer.*num_partitions=0"),
            ({"seconds": 0}, "a positive number.*seconds=0"),
            ({"seconds": float("nan")}, "a positive number.*seconds=nan"),
            ({"error_seconds": -1}, "not negative.*error_seconds=-1"),
            ({"error_seconds": "a"}, "not negative.*error_seconds='a'"),
        ]
    ),
    (
        "planning.PartitionChoice.predicted_seconds",
        {"num_partitions": 0},
        "a positive integer.*num_partitions=0",
    ),
    # Tables.
    *(
        (name, {"architecture": wrong}, f"'ps', 'allgather'.*={wrong!r}")
        for name in (
            "ShardedTable",
            "layers.ShardedEmbedding",
            "layers.SampledSoftmax",
        )
        for wrong in ("PS", 3)
    ),
    ("HybridStrategy", {"prefetch": 2}, "True or False.*prefetch=2"),
    *(
        (name, {"local_aggregation": 2}, "True or False.*aggregation=2")
        for name in (
            "HybridStrategy",
            "planning.engine_bytes",
            "planning.sharded_table_bytes",
        )
    ),
    *(
        (
            "HybridStrategy",
            {"bucket_bytes": wrong},
            f"a positive integer, or None for one.*bucket_bytes={wrong!r}",
        )
        for wrong in (0, 2.5)
    ),
    *(
        (
            "HybridStrategy",
            {"wire_dtype": wrong},
            f"None or one of 'float32', 'bfloat16'.*wire_dtype={wrong!r}",
        )
        for wrong in ("int8", 16)
    ),
    *(
        (
            "HybridStrategy",
            {"architecture": wrong},
            f"'auto', 'hybrid'.*architecture={wrong!r}",
        )
        for wrong in ("PS", 3, None)
    ),
    (
        "callbacks.ArchitectureLogger",
        {"log_dir": 3},
        "the path of a folder.*log_dir=3",
    ),
    (
        "callbacks.ArchitectureLogger",
        {"every_steps": 0},
        "a positive integer.*every_steps=0",
    ),
    *(
        (f"moves.{name}", {key: wrong}, message)
        for name, key in (("move", "moves"), ("repartition", "partitions"))
        for wrong, message in (
            (["ps"], f"`{key}` must be a dict from a `ks.Sharded.*'ps'"),
            ({"embedding": 3}, "must be tables of the model.*'embedding'"),
            ({OTHER: 3}, "must be tables of the model.*Received: 'embeddings'"),
        )
    ),
    *(
        (f"moves.{name}", {"model": wrong}, "a `keras.Model`. Received: model")
        for name in ("move", "repartition")
        for wrong in (None, keras.Model, "model")
    ),
    *(
        ("ShardedTable", {name: wrong}, f"`{name}` {INTEGER}{name}={wrong!r}")
        for name in ("num_rows", "dim", "num_partitions")
        for wrong in (0, -1, "a", 4.0, True)
    ),
    *(
        (
            "ShardedTable",
            {"initializer": wrong},
            "a Keras initializer.*Received",
        )
        for wrong in ("nope", 3)
    ),
    (
        "ShardedTable",
        {"initializer": np.zeros((3, 2))},
        # Keras 3.5 takes no arrays.
        r"\(3, 2\).*Received shape=\(4, 2\)|a Keras initializer.*Received",
    ),
    *(
        ("ShardedTable", {"dtype": wrong}, "floating-point dtype.*Received")
        for wrong in ("flot", "int32", 3)
    ),
    ("ShardedTable", {"trainable": "no"}, "True or False.*Received: tr.*'no'"),
    ("ShardedTable", {"name": 3}, "must be a string.*Received: name=3"),
    ("ShardedTable", {"owner_name": 3}, "a string.*Received: owner_name=3"),
    *(
        (name, {"partition_group": 3}, "a string.*Received: partition_group=3")
        for name in (
            "ShardedTable",
            "layers.ShardedEmbedding",
            "layers.SampledSoftmax",
        )
    ),
    (
        "ShardedTable",
        {"regularizer": "l2"},
        "(callable|instance).*Received: .*='l2'",
    ),
    (
        "ShardedTable",
        {"constraint": 3},
        "(callable|instance).*Received: const.*=3",
    ),
    ("ShardedTable", {"to_stock": 3}, "a function.*Received: to_stock=3"),
    ("ShardedTable.gather", {"ids": None}, "of integers.*Received: ids=None"),
    ("ShardedTable.gather", {"ids": [[1], [2, 3]]}, "of integers.*Received"),
    ("ShardedTable.gather", {"ids": "a"}, "must be integers.*string"),
    ("ShardedTable.gather", {"ids": [0.5]}, "must be integers.*float32"),
    ("ShardedTable.gather", {"ids": [True]}, "must be integers.*bool"),
    *(
        ("ShardedTable.gather", {"columns": wrong}, "a slice of.*columns=")
        for wrong in (1, (0, 1), "a", slice(0, 2, 2), slice(1, 1), slice("a"))
    ),
    *(
        ("ShardedTable.gather", {"dtype": wrong}, "floating-point dtype.*Rec")
        for wrong in ("flot", "int32", 3)
    ),
    *(
        (
            f"planning.{name}",
            {"pulled_bytes": wrong},
            "None or a number of bytes.*: pulled_bytes=",
        )
        for name in ("engine_bytes", "sharded_table_bytes")
        for wrong in (-1, "a", float("nan"))
    ),
    *(
        ("ShardedTable.assign", {"whole": wrong}, message)
        for wrong, message in [
            (np.zeros((2, 2)), r"Received: shape \(2, 2\). Expected: \(4, 2\)"),
            (None, r"Received: shape \(\). Expected: \(4, 2\)"),
            (np.full((ROWS, DIM), "a"), "must be real numbers.*dtype <U1"),
            (np.zeros((ROWS, DIM), complex), "real numbers.*complex128"),
        ]
    ),
    # Layers.
    *(
        (
            f"layers.{layer}",
            {name: wrong},
            f"`{name}` {INTEGER}{name}={wrong!r}",
        )
        for layer in ("ShardedEmbedding", "ShardedEmbeddingBag")
        for name in ("input_dim", "output_dim", "num_partitions")
        for wrong in (0, "a", 1.5, True)
    ),
    *(
        ("layers.ShardedEmbedding", arguments, message)
        for arguments, message in [
            ({"output_dim": None}, f"{INTEGER}output_dim=None"),
            ({"embeddings_initializer": "no"}, "a Keras initializer.*='no'"),
            ({"embeddings_regularizer": "no"}, "a Keras regularizer.*='no'"),
            ({"embeddings_constraint": 3}, "a Keras constraint.*=3"),
            ({"mask_zero": "yes"}, "True or False.*mask_zero='yes'"),
            ({"weights": "a"}, r"of shape \(4, 2\).*Received: 'a'"),
            ({"weights": np.zeros((2, 2))}, r"of shape \(4, 2\).*Received"),
            ({"lora_rank": 2}, "`lora_rank` is not supported.*keras.layers"),
            ({"quantization_config": 2}, "not supported.*keras.layers.Emb"),
            ({"other": 2}, "Unrecognized keyword arguments.*other"),
            ({"dtype": "flot"}, KERAS_DTYPE),
        ]
    ),
    *(
        (
            "layers.ShardedEmbeddingBag",
            {"combiner": wrong},
            f"one of 'sum', 'mean', 'sqrtn'.*combiner={wrong!r}",
        )
        for wrong in ("max", None)
    ),
    (
        "layers.ShardedEmbeddingBag.call",
        {"inputs": tf.ragged.constant([[1]]), "weights": np.ones((1, 1))},
        "tf.RaggedTensor, as the ids are. Received: weights=",
    ),
    ("layers.ShardedEmbedding.call", {"inputs": "a"}, "integers.*string"),
    ("layers.ShardedEmbedding.call", {"inputs": None}, "ids. Received.*=None"),
    *(
        (
            "layers.SampledSoftmax",
            {name: wrong},
            f"`{name}` {INTEGER}{name}={wrong!r}",
        )
        for name in ("num_classes", "num_sampled", "num_partitions")
        for wrong in (0, -1, "a", 5.0)
    ),
    *(
        ("layers.SampledSoftmax", arguments, message)
        for arguments, message in [
            ({"num_sampled": 10}, "num_sampled=10, .*use `keras.layers.Dense"),
            ({"num_classes": 2**24 + 1}, "at most 2.*exact up to.*=16777217"),
            ({"use_bias": "yes"}, "True or False.*use_bias='yes'"),
            ({"kernel_initializer": "no"}, "a Keras initializer.*='no'"),
            ({"seed": "x"}, "`seed` must be an integer.*Received: seed='x'"),
            ({"other": 2}, "Unrecognized keyword arguments.*other"),
        ]
    ),
    (
        "layers.SampledSoftmax.call",
        {"inputs": np.zeros(3, "float32")},
        r"needs inputs `\(batch, ..., dim\)`.*Received: \(3,\)",
    ),
    (
        "layers.SampledSoftmax.loss",
        {"reduction": "no"},
        "Expected one of.*Received: reduction=no",
    ),
    # Whole models.
    *(
        (name, {"model": wrong}, message)
        for name in ("export", "shard_embeddings")
        for wrong, message in [
            (3, "a built `keras.Model`.*Received: model=3"),
            (model, "a built `keras.Model`.*Received: model=<function"),
            (keras.Sequential(), "has no weights yet. Build it first"),
        ]
    ),
    # Callbacks.
    *(
        ("callbacks.PartitionSearch", arguments, message)
        for arguments, message in [
            ({"num_steps": 0}, "a positive integer.*num_steps=0"),
            ({"num_steps": 1.5}, "a positive integer.*num_steps=1.5"),
            ({"num_warm_up_steps": -1}, "not negative.*num_warm_up_steps=-1"),
            ({"num_warm_up_steps": 0.5}, "not negative.*warm_up_steps=0.5"),
            ({"max_seconds": 0}, "a positive number.*max_seconds=0"),
            ({"max_seconds": "9"}, "a positive number.*max_seconds='9'"),
            ({"memory_limit_bytes": 0}, "or None.*memory_limit_bytes=0"),
            ({"memory_limit_bytes": "1G"}, "or None.*limit_bytes='1G'"),
            ({"start": 0}, "None for the number of machines.*start=0"),
            ({"start": True}, "None for the number of machines.*start=True"),
            ({"per_table": "yes"}, "True or False.*per_table='yes'"),
            ({"path": 3}, "the path of a file.*path=3"),
            ({"verbose": 3}, "0 or 1.*verbose=3"),
            ({"verbose": "auto"}, "0 or 1.*verbose='auto'"),
        ]
    ),
    *(
        ("callbacks.ShardedCheckpoint", arguments, message)
        for arguments, message in [
            ({"directory": 3}, "the path of a folder.*directory=3"),
            ({"every_steps": 0}, "positive.*every_steps=0"),
            ({"every_steps": 1.5}, "positive.*every_steps=1.5"),
            ({"every_seconds": -1}, "positive.*every_seconds=-1"),
            ({"every_seconds": "9"}, "positive.*every_seconds='9'"),
            ({"keep": 0}, "positive.*keep=0"),
            ({"keep": None}, "positive.*keep=None"),
            ({"resume": "yes"}, "True or False.*resume='yes'"),
        ]
    ),
    *(
        (
            "callbacks.ShardedCheckpoint.restore",
            {"model": wrong},
            "a `keras.Model`.*Received: model=",
        )
        for wrong in (3, keras.Sequential, "model.keras")
    ),
    # Collectives.
    *(
        (f"collectives.Collectives.{name}", {"name": 3}, NAME)
        for name in (
            "all_reduce",
            "all_to_all",
            "all_to_all_along",
            "all_to_all_back",
            "all_gather",
            "broadcast",
            "barrier",
            "gather_objects",
        )
    ),
    *(
        (f"collectives.Collectives.{name}", {argument: wrong}, message)
        for name, argument in (
            ("all_reduce", "tensors"),
            ("broadcast", "tensors"),
        )
        for wrong, message in [
            (tf.zeros(2), "received EagerTensor. Expected a list of tensors"),
            ([None], NO_TENSOR.format("None")),
            (["a"], "string.*Expected one of bool"),
            (
                [tf.IndexedSlices(tf.zeros([1]), tf.constant([0]))],
                "received tf.IndexedSlices.*convert_to_tensor",
            ),
        ]
    ),
    *(
        (f"collectives.Collectives.{name}", {"tensor": wrong}, message)
        for name in (
            "all_to_all",
            "all_to_all_along",
            "all_to_all_back",
            "all_gather",
        )
        for wrong, message in [
            (None, NO_TENSOR.format("None")),
            (3.0, r"received a scalar.*use `tf.reshape\(x, \[1\]\)`"),
            (tf.constant(["a", "b"]), "string.*Send strings.*`gather_objects`"),
        ]
    ),
    *(
        (
            f"collectives.Collectives.{name}",
            {"tensor": tf.zeros(3)},
            "do not sum",
        )
        for name in ("all_to_all", "all_to_all_along", "all_to_all_back")
    ),
    *(
        (f"collectives.Collectives.{name}", {"route": wrong}, message)
        for name in ("all_to_all_along", "all_to_all_back")
        for wrong, message in [
            (None, "route=None. Expected the `Route` that an `all_to_all`"),
            (3, "route=3. Expected the `Route` that an `all_to_all`"),
        ]
    ),
    *(
        ("collectives.Collectives.all_to_all", {"splits": wrong}, message)
        for wrong, message in [
            ([3], r"do not sum.*splits \[3\] for a tensor of 2 rows"),
            ([-2], r"do not sum.*splits \[-2\]"),
            ([1, 1], r"shape \(2,\). Expected \(1,\): the number of rows"),
            ([2.0], "dtype float32. Expected integers"),
            ("a", "dtype string. Expected integers"),
            (None, NO_TENSOR.format("None")),
        ]
    ),
    *(
        ("collectives.Collectives.all_reduce", arguments, message)
        for arguments, message in [
            ({"op": "prod"}, "op='prod'. Expected one of 'sum'"),
            ({"op": 3}, "op=3. Expected one of 'sum'"),
            (
                {"op": "mean", "tensors": [tf.constant([1])]},
                "int32 with op='mean'.*Cast it",
            ),
        ]
    ),
    *(
        (
            "collectives.Collectives.broadcast",
            {"root": wrong},
            f"root={wrong!r}. Expected a rank from 0 to 0",
        )
        for wrong in (1, -1, "a", 0.0, False)
    ),
    (
        "collectives.Collectives.gather_objects",
        {"value": Unpicklable()},
        "objects that pickle. Received:.*Send the numbers.*holds a lock",
    ),
    *(
        (name, {"timeout": wrong}, "at least 5.*Received")
        for name in ("HybridStrategy", "collectives.start")
        for wrong in (1, float("nan"), "soon", True)
    ),
    (
        "collectives.Collectives.group",
        {"name": "rack"},
        "must be 'machine' or 'across'.*name='rack'",
    ),
    *(
        ("collectives.Topology", arguments, message)
        for arguments, message in [
            ({"rank": 3, "size": 2}, "from 0 to size - 1. Received: rank=3"),
            ({"rank": "a"}, "must be an integer.*Received: rank='a'"),
            ({"size": 0}, "Received: rank=0, size=0"),
            ({"local_rank": -1}, "Received: local_rank=-1"),
            ({"local_size": 0.5}, "Received: local_rank=0, local_size=0.5"),
            ({"cross_rank": 1}, "Received: cross_rank=1, cross_size=1"),
            ({"cross_size": None}, "Received: cross_rank=0, cross_size=None"),
        ]
    ),
    ("collectives.start", {"engine": "mpi"}, "must be one of.*engine='mpi'"),
    # Input and losses.
    (
        "data.shard",
        {"dataset": [1]},
        r"TypeError: Expected a `tf.data.Dataset`.*Received: \[1\]",
    ),
    (
        "data.shard",
        {"dataset": tf.data.Dataset.range(3)},
        "scalars.*Batch it first: `dataset.batch",
    ),
    ("data.shard", {"collectives": None}, "`strategy.collectives`.*=None"),
    ("data.shard", {"by": "rows"}, "'files', 'elements'.*by='rows'"),
    *(
        (name, arguments, message)
        for name in ("losses.globalize", "losses.GlobalMean")
        for arguments, message in [
            ({"loss": "nope"}, "a loss's name.*Received: loss='nope'"),
            ({"loss": 3}, "a loss's name.*Received: loss=3"),
            ({"collectives": 3}, "`strategy.collectives`.*collectives=3"),
        ]
    ),
    ("losses.GlobalMean", {"loss": None}, "a loss's name.*loss=None"),
    ("losses.GlobalMean", {"whole_batch": "no"}, "True, False.*='no'"),
    ("losses.GlobalMean", {"name": 3}, "must be a string.*name=3"),
    # Planning.
    *(
        ("planning.Cluster", {name: wrong}, f"`{name}` {INTEGER}{name}=")
        for name in ("num_machines", "processes_per_machine")
        for wrong in (0, -1, "a", 4.0, True, None)
    ),
    *(
        ("planning.VariableSpec", {name: wrong}, f"{message}.*: {name}=")
        for name, message, *all_wrong in [
            ("name", "must be a string", 3, None),
            (
                "shape",
                "a tuple of positive integers.*that of the rows",
                *(None, 3, (), (0, 2), (-1, 2), (2.0, 2), "ab", (None, 2)),
            ),
            (
                "alpha",
                "a fraction from 0 to 1, or None for a dense",
                *(-0.1, 1.1, float("nan"), "a", True),
            ),
            ("dtype", "a dtype of numbers", "flot", "str", 3, None, [2, 3]),
            (
                "alpha_machine",
                r"a fraction from alpha \(which is 0.5\) to 1",
                *(0.4, 1.1, float("nan"), "a"),
            ),
            ("num_partitions", "a positive integer or None", 0, "a", True),
        ]
        for wrong in all_wrong
    ),
    (
        "planning.VariableSpec",
        {"alpha": None, "alpha_machine": 0.5},
        "for a sparse variable.*Received: alpha_machine=0.5",
    ),
    ("planning.VariableSpec.num_bytes", {"dtype": "flot"}, "dtype='flot'"),
    *(
        ("plan", arguments, message)
        for arguments, message in [
            *(({"model": m()}, "compiled.*model=") for m in (str, model)),
            ({"dataset": [1]}, r"a `tf.data.Dataset`.*: dataset=\[1\]"),
            ({"cluster": 4}, "a `ks.planning.Cluster`.*: cluster=4"),
            ({"engine": "mpi"}, "one of 'local', 'native', 'h.*: engine="),
            ({"num_batches": 0}, "a positive integer.*: num_batches=0"),
        ]
    ),
    *(
        (name, {"cluster": wrong}, "a `ks.planning.Cluster`.*: cluster=")
        for name in (
            "plan",
            "engine_bytes",
            "sharded_table_bytes",
            "transfer_bytes",
        )
        for name in [f"planning.{name}"]
        for wrong in (None, 4, ks.planning.Cluster)
    ),
    *(
        (f"sparsity.{name}", {"model": wrong}, "a Keras model or.*: model=")
        for name in ("measured", "popularity", "reset")
        for wrong in (None, "model", keras.Model, [3])
    ),
    *(
        (
            "sparsity.VariableSparsity.spec",
            {"num_partitions": wrong},
            f"`num_partitions` {INTEGER}num_partitions={wrong!r}",
        )
        for wrong in (0, "a")
    ),
    *(
        (name, {"variables": wrong}, "a list of one or more.*: variables=")
        for name in ("planning.plan", "planning.alpha_model")
        for wrong in (None, [], [3], spec(), ["table"])
    ),
    *(
        (name, {"variable": wrong}, "a `ks.planning.Var.*: variable=")
        for name in ("engine_bytes", "sharded_table_bytes", "transfer_bytes")
        for name in [f"planning.{name}"]
        for wrong in (None, "table", [spec()])
    ),
    *(
        (name, {"engine": wrong}, "one of 'local', 'native', 'h.*: engine=")
        for name in ("planning.plan", "planning.engine_bytes")
        for wrong in ("mpi", 3, True)
    ),
    *(
        (name, arguments, message)
        for name in ("planning.plan", "planning.transfer_bytes")
        for arguments, message in [
            *(
                ({"local_aggregation": wrong}, "one of 'none', 'push', 'both'")
                for wrong in ("all", True, None)
            ),
            *(
                ({"wire_dtype": wrong}, "a dtype of numbers.*: wire_dtype=")
                for wrong in ("flot", 3)
            ),
            *(
                ({"index_bytes": wrong}, "a number of bytes.*: index_bytes=")
                for wrong in (-1, "int64", None, float("nan"), True)
            ),
        ]
    ),
    *(
        (
            f"planning.{name}",
            {"architecture": wrong},
            "one of 'allreduce', 'ps', 'allgather'.*: architecture=",
        )
        for name in ("transfer_bytes", "engine_bytes")
        for wrong in ("auto", None, 3, ["ps"])
    ),
    (
        "planning.transfer_bytes",
        {"architecture": "allgather", "variable": dense_spec()},
        "'allreduce' or 'ps' for 'table': it is dense.*its `alpha`",
    ),
    *(
        (
            f"planning.{name}",
            {"first_machine": wrong, "variable": dense_spec()},
            "machine's number, 0 to 1. Received: first_machine=",
        )
        for name in ("transfer_bytes", "engine_bytes")
        for wrong in (2, -1, "a", 0.0, None, True)
    ),
    *(
        ("planning.plan", {"architectures": wrong}, "a list of some of.*'ps'")
        for wrong in ("ps", [], ["auto"], None, [["ps"]])
    ),
    (
        "planning.plan",
        {"architectures": ["allgather"]},
        "such that 'table' has one: it is dense.*: architectures=",
    ),
    (
        "planning.sharded_table_bytes",
        {"variable": dense_spec()},
        "sparse: give it the `alpha`.*: variable=",
    ),
    *(
        ("planning.sharded_table_bytes", {"padded": wrong}, "True or False")
        for wrong in ("yes", None, 1)
    ),
    *(
        (
            f"planning.{name}",
            {"largest_rows": wrong},
            "None or a number of rows. Received: largest_rows=",
        )
        for name in ("engine_bytes", "sharded_table_bytes")
        for wrong in (-1, "a", float("nan"), True)
    ),
    # The launcher.
    *(
        ("launch.run", arguments, message)
        for arguments, message in [
            ({"function": 3}, "top level of a module.*Received: 3"),
            ({"function": lambda: 1}, "top level.*to a file of its own"),
            ({"function": None}, "top level of a module.*Received: None"),
            ({"function": np.zeros(2)}, "top level of a module.*Received: ar"),
            ({"num_processes": 20_000}, "At most 10000 pro.*Received: 20000"),
            ({"num_processes": 10_000}, "of memory, and this machine has"),
            ({"num_processes": 0}, f"{INTEGER}num_processes=0"),
            ({"num_processes": "a"}, f"{INTEGER}num_processes='a'"),
            ({"num_processes": 1.5}, f"{INTEGER}num_processes=1.5"),
            (
                {"engine": "mpi"},
                "must be one of 'local'.*: engine='mpi'",
            ),
            ({"engine": np.zeros(2)}, "must be one of 'local'.*: engine=array"),
            (
                {"engine": "local", "num_processes": 2},
                "for one process.*2 processes. Use engine='native'",
            ),
            ({"machines": 0}, f"{INTEGER}machines=0"),
            ({"machines": "a"}, f"{INTEGER}machines='a'"),
            (
                {"num_processes": 2, "machines": 3},
                "must divide.*2 processes and machines=3",
            ),
            ({"args": 3}, "a tuple of arguments.*Received: args=3"),
            ({"args": (Unpicklable(),)}, "must pickle. Received.*a lock"),
            ({"kwargs": 3}, "a dictionary.*Received: kwargs=3"),
            ({"kwargs": {1: 2}}, "a dictionary.*Received: kwargs={1: 2}"),
            ({"timeout": 0}, "positive number of seconds.*timeout=0"),
            ({"timeout": "9"}, "positive number of seconds.*timeout='9'"),
            ({"env": 3}, "a dictionary of strings.*Received: env=3"),
            ({"env": {"": "a"}}, "a dictionary of strings.*as an environment"),
            ({"env": {"A=B": "a"}}, "a dictionary of strings.*env={'A=B': "),
            ({"env": {"A": "\0"}}, "a dictionary of strings.*as an environm"),
            ({"env": {"A": 1}}, "a dictionary of strings.*env={'A': 1}"),
        ]
    ),
]

# Arguments for which any value is valid.
ANY_VALUE = {
    "HybridOptimizer.kwargs": "none is taken: see learning_rate",
    "collectives.Collectives.check_equal.value": "compared by its `repr`",
    "collectives.Collectives.check_equal.what": "only shown",
    "collectives.Collectives.check_equal.fix": "only shown",
    "layers.ShardedEmbedding.call.training": "a truth value",
    "layers.SampledSoftmax.call.training": "a truth value",
}
# Public classes that only this package makes, and errors.
NOT_CALLED = {
    "collectives.CollectiveError": "an error",
    "collectives.Collectives": "made by `start`",
    "collectives.Route": "made by `all_to_all`",
    "collectives.Route.reversed": "no argument",
    "collectives.agreed_seed": "no argument",
    "collectives.current": "no argument",
    "collectives.explained": "for this package's own errors",
    "collectives.failure": "no argument",
    "launch.LaunchError": "an error",
    "launch.main": "see COMMAND_LINE",
    "losses.GlobalMean.call": "what Keras's losses call",
    "planning.Choice": "made by `plan`",
    "planning.PartitionChoice": "made by `PartitionSampler`",
    "planning.PartitionChoice.explained": "no argument",
    "planning.PartitionSample": "made by `PartitionSampler`",
    "planning.PartitionSampler.choice": "no argument",
    "planning.PartitionSampler.proposal": "no argument",
    "planning.Plan": "made by `plan`",
    "planning.TransferBytes": "made by `transfer_bytes`",
    "sparsity.VariableSparsity": "made by `measured`",
    "HybridOptimizer.options": "no argument",
    "HybridOptimizer.places": "no argument",
    "HybridOptimizer.state": "no argument",
    # Between files of this package.
    "callbacks.ArchitectureLogger.see": "called by `fit`",
    "callbacks.ShardedCheckpoint.begin": "called by `fit`",
    "callbacks.ShardedCheckpoint.order_seed": "called by `fit`",
    "callbacks.ShardedCheckpoint.use_input": "called by `fit`",
    **dict.fromkeys(
        (
            f"ShardedTable.{name}"
            for name in (
                "create",
                "hold",
                "layout_over_owners",
                "read",
                "settle",
                "shard",
                "to_stock",
                "use_constraint",
                "use_regularizer",
            )
        ),
        "called by layers, saving and the optimizer",
    ),
    **dict.fromkeys(
        (
            f"HybridOptimizer.{name}"
            for name in (
                "follow",
                "may_keep_rows_of",
                "slots_of",
                "updates_rows_of",
            )
        ),
        "called where tables are moved",
    ),
    **dict.fromkeys(
        (
            f"layers.SampledSoftmax.{name}"
            for name in ("sampled_losses", "full_losses")
        ),
        "called by the loss",
    ),
}


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    BAD,
    ids=[f"{name} {', '.join(map(str, wrong))}" for name, wrong, _ in BAD],
)
def test_bad_input_is_explained(name, wrong, message):
    function, arguments = VALID[name]()
    error = ValueError
    if message.startswith("TypeError: "):
        error, message = TypeError, message.removeprefix("TypeError: ")
    with pytest.raises(error) as raised:
        function(**{**arguments, **wrong})
    assert type(raised.value) in (ValueError, TypeError)
    assert re.search(f"(?s){message}", str(raised.value)), raised.value


@pytest.mark.parametrize("to", [0, "a", 2.0, ("ps", 0), ("ps", 1, 2), "auto"])
def test_bad_places_of_tables_are_explained(to):
    layer = ks.layers.ShardedEmbedding(ROWS, DIM, name="words")
    moved = keras.Sequential([keras.Input((3,)), layer])
    with pytest.raises(ValueError, match=r"`moves\['words'\].*Received"):
        ks.moves.move(moved, {layer.table: to})
    with pytest.raises(ValueError, match=r"`partitions\['words'\].*integer"):
        ks.moves.repartition(moved, {layer.table: to})
    layer.table.variable.use(None)  # as if it were built later
    with pytest.raises(ValueError, match="not distributed yet. Build the"):
        ks.moves.repartition(moved, {layer.table: 2})


# Which need a new process, or a checkpoint.
EXPENSIVE = {"launch.run", "callbacks.ShardedCheckpoint.restore"}


@pytest.mark.parametrize("name", [n for n in VALID if n not in EXPENSIVE])
def test_the_other_arguments_are_right(name):
    """So that it is the wrong one that each line of the table is about."""
    function, arguments = VALID[name]()
    function(**arguments)


# Nothing is left out.


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


def test_every_argument_is_in_the_table():
    callables = public_callables()
    tested = {f"{name}.{key}" for name, wrong, _ in BAD for key in wrong}
    missing = []
    for name, function in callables.items():
        if name in NOT_CALLED:
            continue
        missing += [
            f"{name}.{parameter}"
            for parameter in parameters(function)
            if f"{name}.{parameter}" not in tested | set(ANY_VALUE)
        ]
    assert not missing
    assert {name for name, _, _ in BAD} <= VALID.keys()


def test_the_lists_name_what_exists():
    callables = public_callables()
    overridden = {"HybridOptimizer.apply", "HybridOptimizer.build"}
    overridden |= {n for n in VALID if n.endswith(".call")}
    assert VALID.keys() <= callables.keys() | overridden
    assert NOT_CALLED.keys() <= callables.keys() | {"losses.GlobalMean.call"}


# Anything for anything.


class Unspeakable:
    """Neither its `repr` nor its truth nor its equality is to be had."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __bool__(self):
        raise RuntimeError("no truth")

    def __eq__(self, other):
        raise RuntimeError("no equality")

    __hash__ = object.__hash__


def deep():
    value = []
    for _ in range(20_000):
        value = [value]
    return value


ANYTHING = {
    **{
        repr(value): lambda value=value: value
        for value in (
            *(None, True, False, ..., 0, -1, 3, 2.5, -0.5, 1e300, 1j),
            *(10**30, -(10**30), float("nan"), float("inf"), -float("inf")),
            *("", "text", "\0", b"", b"bytes", b"\xff"),
            *([], [1], [None], ["text"], (), (1, 2), ((),), {}, {"a": 1}),
            *({3: None}, {1, 2}, range(3), slice(None), int, keras.Model),
            *(np.float32(2), np.int64(-3), np.bool_(True), np.str_("text")),
        )
    },
    "long text": lambda: "text" * 10_000,
    "path": lambda: pathlib.Path("text"),
    "deep": deep,
    "function": lambda: len,
    "lambda": lambda: lambda *_, **__: None,
    "module": lambda: np,
    "object": object,
    "generator": lambda: (i for i in range(3)),
    "Unspeakable": Unspeakable,
    "[Unspeakable]": lambda: [Unspeakable()],
    "scalar array": lambda: np.array(3),
    "array": lambda: np.arange(3),
    "matrix": lambda: np.ones((4, 2)),
    "empty array": lambda: np.zeros(0),
    "array of text": lambda: np.array(["text", "more"]),
    "array of objects": lambda: np.array([None, {}], object),
    "dates": lambda: np.array(["2020-01-01"], "datetime64[D]"),
    "scalar tensor": lambda: tf.constant(3),
    "tensor": lambda: tf.constant([1.0, 2.0]),
    "tensor of text": lambda: tf.constant(["text", "more"]),
    "ragged": lambda: tf.ragged.constant([[1], [2, 3]]),
    "sparse": lambda: tf.sparse.from_dense([[0, 1]]),
    "slices": lambda: tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([0])),
    "symbolic": lambda: keras.Input((3,)),
    "variable": variable,
    "tf.Variable": lambda: tf.Variable([1.0, 2.0]),
    "dtype": lambda: tf.int32,
    "dataset": lambda: tf.data.Dataset.range(3),
    "layer": lambda: keras.layers.Dense(1),
    "unbuilt model": lambda: keras.Sequential(),
    "optimizer": lambda: keras.optimizers.SGD(),
    "strategy": tf.distribute.get_strategy,
}
# Of values that are only too many or too large for what is there.
OTHER_ERRORS = {
    "ShardedTable.gather": tf.errors.InvalidArgumentError,  # of an id outside
    "callbacks.ShardedCheckpoint.restore": FileNotFoundError,
}
# Keras's layers and TensorFlow look through all that they are given.
NESTED_TOO_DEEPLY = "depth exceeded (during flattening the tree|in flatten)"
# Whose arguments are tested elsewhere, or have nothing to be tested by.
NOT_FUZZED = {
    "launch.run": "starts processes: tests/launch/test_program.py",
    "collectives.start": "starts an engine: tests/collectives/test_startup.py",
}


class Hang(BaseException):
    pass


def _on_alarm(*_):
    raise Hang


def fault(name, function, arguments, parameter, value):
    """What is wrong with how a value is taken; None if it is all right."""
    signal.setitimer(signal.ITIMER_REAL, 10)
    try:
        function(**{**arguments, parameter: value})
        return None
    except Exception as error:
        told = str(error)
        is_explained = (
            type(error) in (ValueError, TypeError)
            and parameter.rstrip("s") in told.lower()
            and "eceived" in told
            and "ambiguous" not in told
            and len(told) < 5_000
        )
        is_other = isinstance(error, OTHER_ERRORS.get(name, ()))
        if is_explained or is_other or re.search(NESTED_TOO_DEEPLY, told):
            return None
        return f"{type(error).__name__}: {told[:300]}"
    except Hang:
        return "it hangs"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize("name", [n for n in VALID if n not in NOT_FUZZED])
def test_anything_for_an_argument_is_taken_or_explained(name):
    before = signal.signal(signal.SIGALRM, _on_alarm)
    faults = []
    try:
        function, arguments = VALID[name]()
        for parameter in sorted(parameters(function)):
            if f"{name}.{parameter}" in ANY_VALUE:
                continue
            for label, make in ANYTHING.items():
                found = fault(name, function, arguments, parameter, make())
                if found:
                    faults.append(f"{parameter}={label}: {found}")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not faults, "\n".join(faults)


# The command line.

COMMAND_LINE = [
    ("", "one of the arguments -n.* --hosts --hostfile is required"),
    ("-n 2", "name the script to run"),
    ("-n 0 SCRIPT", "positive integer. Received: num_processes=0"),
    ("-n -1 SCRIPT", "positive integer. Received: num_processes=-1"),
    ("-n two SCRIPT", "invalid int value: 'two'"),
    ("-n 2 missing.py", "there is no script 'missing.py'"),
    ("-n 2 --unknown SCRIPT", "unrecognized arguments: --unknown"),
    ("-n 2 --hosts a:2 SCRIPT", "--hosts: not allowed with argument -n"),
    (
        "--hosts a:2 --hostfile f SCRIPT",
        "--hostfile: not allowed.*--hosts",
    ),
    ("--hosts a:x SCRIPT", "must be a number"),
    ("--hostfile missing SCRIPT", "No such file or directory: 'missing'"),
    ("-n 2 --engine mpi SCRIPT", "must be one of"),
    ("-n 2 --env =3 SCRIPT", "--env takes NAME or NAME=VALUE"),
    ("-n 2 --env NOT_SET SCRIPT", "no such variable here"),
    ("-n 2 --python p SCRIPT", "--python is for other hosts"),
    ("-n 2 --ssh s SCRIPT", "--ssh is for other hosts"),
    ("--hosts a:2 --ssh ' SCRIPT", '--ssh takes a client.*Received: "\'"'),
    ("-n 2 --max-restarts -1 SCRIPT", "0 or more. Received: -1"),
    ("-n 2 --max-restarts x SCRIPT", "invalid int value: 'x'"),
    ("-n 2 --rank-timeout 1 SCRIPT", "--rank-timeout must be a number"),
    ("-n 2 --rank-timeout nan SCRIPT", "at least 5"),
    ("-n 2 --timeout -1 SCRIPT", "positive number of seconds.*-1"),
    ("-n 2 --timeout x SCRIPT", "--timeout: invalid float value: 'x'"),
    ("-n 2 --log-dir SCRIPT SCRIPT", "--log-dir takes a folder.*File exists"),
    ("-n 2 --log-dir /proc/a/b SCRIPT", "--log-dir takes a folder.*No such"),
    ("-n 2 --log-dir /proc/self SCRIPT", "--log-dir takes a folder"),
    ("-n 2 --log-dir SCRIPT/a SCRIPT", "--log-dir takes.*Not a directory"),
    ("-n 20000 SCRIPT", "At most 10000 processes.*Received: 20000"),
    (f"-n {'9' * 99} SCRIPT", "At most 10000 processes"),
    ("-n 10000 SCRIPT", "of memory, and this machine has .* Start fewer"),
    ("-n 1.5 SCRIPT", "invalid int value: '1.5'"),
    (f"--hosts a:{'9' * 9999} SCRIPT", "At most 10000 processes"),
    ("--hosts localhost:10000 SCRIPT", "of memory, and this machine has"),
    ("--hosts a:1 --ssh \\ SCRIPT", "--ssh takes a client and its options"),
    ("--hostfile /dev/zero SCRIPT", "/dev/zero is not a text file of hosts"),
    ("--hostfile /proc/self/exe SCRIPT", "is not a text file of hosts"),
    ("--hostfile / SCRIPT", "Is a directory"),
    ("-n 2 --timeout nan SCRIPT", "positive number of seconds.*nan"),
    ("-n 2 --env KERAS_SPARSITY_TIMEOUT=1 SCRIPT", "TIMEOUT must be a number"),
    ("-n 2 --env KERAS_SPARSITY_SEED=x SCRIPT", "SEED must be a whole number"),
    ("-n 2 --module", "name the script to run"),
]
ANY_OPTION = {
    "--help": "takes no value",
    "--num-processes": "-n",
}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('it ran')")
    return str(path)


@pytest.mark.parametrize(("arguments", "message"), COMMAND_LINE)
def test_wrong_usage_is_explained(arguments, message, script, capsys):
    arguments = arguments.replace("SCRIPT", script).split()
    with pytest.raises(SystemExit) as end:
        ks.launch.main(["run", *arguments])
    assert end.value.code == 2
    # Lines are broken to the terminal's width.
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(message, told), told


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SSH", "'", 'KERAS_SPARSITY_SSH takes a client.*Received: "\'"'),
        ("SSH", " ", "KERAS_SPARSITY_SSH takes a client.*Received: ' '"),
        ("TIMEOUT", "soon", "KERAS_SPARSITY_TIMEOUT must be.*'soon'"),
        ("SEED", "-1", "KERAS_SPARSITY_SEED must be.*'-1'"),
        (
            "ALLOWED_NETWORKS",
            "x",
            "_ALLOWED_NETWORKS must be IP.*Received: 'x'",
        ),
    ],
)
def test_a_wrong_variable_is_explained(
    name, value, message, script, capsys, monkeypatch
):
    monkeypatch.setenv(f"KERAS_SPARSITY_{name}", value)
    with pytest.raises(SystemExit):
        ks.launch.main(["run", "--hosts", "a:1", script])
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(message, told), told


@pytest.mark.parametrize(
    ("client", "message"),
    [
        ("false", "a: 'false' ended with code 1 and printed no error: is it"),
        ("true", "a: no answer from Python, .*: is 'true' an ssh client?"),
        ("echo", "a: no answer from Python, .*: is 'echo' an ssh client?"),
        ("/", "a: cannot run /: Permission denied"),
        ("/missing/ssh", "a: cannot run /missing/ssh: No such file"),
    ],
)
def test_what_is_no_ssh_client(client, message, script, capsys):
    hosts = ["--hosts", "a:1", "--ssh", client]
    assert ks.launch.main(["run", *hosts, script]) == 1
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    "option",
    [
        *("-n", "--hosts", "--hostfile", "--engine", "--log-dir", "--timeout"),
        *("--rank-timeout", "--max-restarts", "--env", "--python", "--ssh"),
    ],
)
def test_no_value_of_an_option_breaks_the_command(option, tmp_path, capsys):
    """Nothing starts, as there is no script."""
    odd = ["", " ", "'", '"', "-", "--", "0", "-1", "nan", "1e999", "0x10"]
    odd += ["None", "[]", "a,b", "a:1,,", ":", "@", "/", "/dev/null", "~"]
    odd += ["é", "\udcff", "\n", "\x7f", "%s", "{}", "$(id)", "9" * 5000]
    for value in odd:
        where = [] if option in ("-n", "--hosts", "--hostfile") else ["-n", "1"]
        if option in ("--python", "--ssh"):
            where = ["--hosts", "a:1"]
        with pytest.raises(SystemExit) as end:
            ks.launch.main(
                ["run", *where, f"{option}={value}", str(tmp_path / "none")]
                if option.startswith("--")
                else ["run", *where, option, value, str(tmp_path / "none")]
            )
        assert end.value.code == 2, value
        errors = capsys.readouterr().err
        assert "keras-sparsity run: error: " in errors, value


def test_every_option_is_in_the_table(capsys):
    with pytest.raises(SystemExit):
        ks.launch.main(["run", "--help"])
    options = set(re.findall(r"(?<![\w-])--[a-z-]+", capsys.readouterr().out))
    tested = " ".join(arguments for arguments, _ in COMMAND_LINE).split()
    assert options <= set(tested) | ANY_OPTION.keys()
