"""Wrong arguments of strategies, optimizers, callbacks, input and losses."""

import keras
import tensorflow as tf

import keras_sparsity as ks
from tests.public_calls import model

SGD = keras.optimizers.SGD

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
    *(
        ("PipelineStrategy", arguments, message)
        for arguments, message in [
            ({"schedule": "2f2b"}, "one of.*'spectrain'.*='2f2b'"),
            ({"stages": 2}, "stages=2, replicas=1 and 1 proc.*stages=1 with"),
            ({"stages": "a"}, "a positive integer, None, a list.*stages='a'"),
            ({"stages": 0}, "a positive integer, None, a list.*stages=0"),
            ({"replicas": 2}, "replicas=2 and 1 processes.*replicas=1"),
            ({"replicas": 1.5}, "a positive integer.*replicas=1.5"),
            ({"memory_bytes": 0}, "positive integer or None.*bytes=0"),
            ({"messages_ahead": 1}, "True or False.*messages_ahead=1"),
            (
                {"schedule": "1f1b", "messages_ahead": True},
                "with a flush waits.*='1f1b' and messages_ahead=True",
            ),
            ({"stages": ["a", 3]}, "a list of layers' names.*'a', 3"),
            ({"stages": [["a"], "b"]}, "a list of layers' names.*'b'"),
            ({"num_micro_batches": 0}, "a positive integer.*batches=0"),
            ({"prediction": "none"}, "'paper' or 'sequential'.*='none'"),
            ({"decay": 1}, "from 0 to below 1.*decay=1"),
            (
                {"schedule": "stash", "prediction": "sequential"},
                "'stash', prediction='sequential' and.*Leave them out",
            ),
            ({"schedule": "1f1b", "decay": 0.5}, "='1f1b', .*decay=0.5"),
            ({"wire_dtype": "int8"}, "None or one of.*wire_dtype='int8'"),
            ({"engine": "mpi"}, "one of.*'native'.*engine='mpi'"),
            ({"timeout": 0}, "`timeout` must be.*at least 5.*Received: 0"),
        ]
    ),
    *(
        ("LayerPlacementStrategy", arguments, message)
        for arguments, message in [
            ({"stages": 2}, "a list of layers' names.*Received: stages=2"),
            ({"rule": "best"}, "'published' or 'fastest'.*rule='best'"),
            ({"num_tail_workers": 0}, "a positive integer.*workers=0"),
            ({"tail_batches": "each"}, "'whole' or 'by_worker'.*='each'"),
            ({"head_gradients": "ps"}, "'allreduce' or 'server'.*='ps'"),
            ({"tail_split": "rows"}, "'batch' or 'columns' or None.*='rows'"),
            (
                {"tail_split": "columns", "tail_batches": "by_worker"},
                "compute whole batches.*tail_batches=.by_worker",
            ),
            ({"num_examples": 0.5}, "a positive integer.*examples=0.5"),
            ({"threshold": "low"}, "a number.*threshold='low'"),
            ({"wire_dtype": "int8"}, "None or one of.*wire_dtype='int8'"),
            ({"engine": "mpi"}, "one of.*'native'.*engine='mpi'"),
            ({"timeout": 0}, "`timeout` must be.*at least 5.*Received: 0"),
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
    *(
        ("gather_batch", {"x": wrong}, f"`x` must be a tensor.*{shown}")
        for wrong, shown in [
            (None, "=None"),
            (2.0, r"x=.*shape=\(\)"),
            ("a", "Received"),
            (tf.ragged.constant([[1]]), "RaggedTensor"),
        ]
    ),
    ("losses.GlobalMean", {"name": 3}, "must be a string.*name=3"),
]
