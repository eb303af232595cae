"""Wrong arguments of tables, their moves, and layers."""

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from tests.bad_arguments.patterns import INTEGER
from tests.public_calls import DIM, ROWS, table

KERAS_DTYPE = "[Pp]olicy|dtype"
# A table of no model.
OTHER = table()

BAD = [
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
        ("HybridStrategy", {"synchronous": False, **arguments}, message)
        for arguments, message in [
            ({"synchronous": 0}, "True or False.*synchronous=0"),
            *(
                ({"max_staleness": s}, f"100,000 .*or None.*staleness={s!r} ")
                for s in (-1, 1.0, True, 100_001)
            ),
            (
                {"max_staleness": 1001, "delay": "fixed"},
                "from 0 to 1,000 with delay='fixed'.*max_staleness=1001",
            ),
            *(
                (
                    {"max_staleness": 0, name: value, **delay},
                    f"{name}={value!r}, max_staleness=0.*Leave it out",
                )
                for name, value, delay in (
                    ("staleness_aware", True, {}),
                    ("delay_compensation", 0.5, {}),
                    ("delay_compensation", 0.5, {"delay": "fixed"}),
                )
            ),
            *(
                ({name: "sum"}, f"no effect.*{name}='sum' with synchronous=F")
                for name in ("dense_aggregation", "sparse_aggregation")
            ),
            ({"delay": "none"}, "'bounded' or 'fixed'.*delay='none'"),
            ({"delay": "fixed"}, "exactly.*max_staleness=None.*bounded"),
            (
                {"synchronous": True, "max_staleness": 2},
                "Received: synchronous=True, max_staleness=2.*Add",
            ),
            ({"staleness_aware": 1}, "True or False.*staleness_aware=1"),
            (
                {"synchronous": True, "staleness_aware": True},
                "staleness_aware=True, synchronous=True.*Use `synchronous=F",
            ),
            (
                {
                    "staleness_aware": True,
                    "delay": "fixed",
                    "max_staleness": 1,
                },
                "synchronous=False, delay='fixed'. Use `delay=\"bounded\"`",
            ),
            *(
                ({"delay_compensation": c}, f"from 0, or None.*sation={c!r}")
                for c in (-1.0, True, "1", float("inf"))
            ),
            (
                {"synchronous": True, "delay_compensation": 1.0},
                "delay_compensation=1.0, synchronous=True.*leave it out",
            ),
            ({"architecture": "measured"}, "'measured' with synchronous=False"),
            ({"prefetch": True}, "prefetch=True with synchronous=False"),
            (
                {"wire_dtype": "int8"},
                'in 16 bits at least. Received: wire_dtype="int8" with',
            ),
            ({"architecture": "allreduce"}, "architecture='allreduce' with"),
        ]
    ),
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
        for wrong in ("int4", 16)
    ),
    *(
        (
            "HybridStrategy",
            {"architecture": wrong},
            f"'auto', 'measured', 'hybrid'.*architecture={wrong!r}",
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
    *(
        ("layers.ShardedEmbeddingCollection", arguments, message)
        for arguments, message in [
            ({"features": {}}, "a dict or a list of.*features={}"),
            ({"features": 3}, "a dict or a list of.*features=3"),
            ({"features": [4]}, r"`FeatureConfig`.*Received: 4 \(of type int"),
            (
                {"features": [ks.layers.ShardedEmbeddingBag(ROWS, DIM)]},
                r"`features\[0\]` .*a ShardedEmbeddingBag. In place of",
            ),
            ({"combiners": 3}, "`combiners` must be a dict or a list.*=3"),
            ({"combiners": {"b": "sum"}}, r"features \['a'\].*'b'"),
            ({"combiners": {"a": "max"}}, "None or one of 'sum'.*='max'"),
            ({"other": 2}, "Unrecognized keyword arguments.*other"),
        ]
    ),
    *(
        ("layers.ShardedEmbeddingCollection.call", arguments, message)
        for arguments, message in [
            (
                {"inputs": {"a": np.array([1])}},
                r"with \['a'\]. Expected: \['a', 'b'\]",
            ),
            ({"inputs": [np.array([1])] * 2}, "must be a dict of.*type list"),
            (
                {"weights": {"a": np.ones(1)}},
                r"Received: weights of \['a'\]. Expected: of some of \['b'\]",
            ),
            ({"weights": 3}, "`weights` must be a dict or a list.*=3"),
        ]
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
            (
                {"table": "a"},
                "must be a `ks.layers.ShardedE.*='a' .of type str",
            ),
            (
                {"table": keras.layers.Embedding(9, 4)},
                "type Embedding.*Use a `ShardedEmbedding` in place",
            ),
            (
                {"table": ks.layers.ShardedEmbedding(8, 4, name="few")},
                "row for each class.*num_classes=9.*'few' with input_dim=8",
            ),
            *(
                (
                    {"table": ks.layers.ShardedEmbedding(9, 4), name: value},
                    f"that layer's table, so `{name}` cannot be given",
                )
                for name, value in [
                    ("kernel_initializer", "ones"),
                    ("num_partitions", 2),
                    ("partition_group", "a"),
                    ("architecture", "ps"),
                ]
            ),
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
]
