"""Wrong arguments of plans, and of what they are made from."""

import keras

import keras_sparsity as ks
from tests.bad_arguments.patterns import INTEGER
from tests.public_calls import dense_spec, model, spec

BAD = [
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
            ({"error_seconds": True}, "not negative.*error_seconds=True"),
        ]
    ),
    (
        "planning.PartitionChoice.predicted_seconds",
        {"num_partitions": 0},
        "a positive integer.*num_partitions=0",
    ),
    # Planning.
    *(
        ("planning.Cluster", {name: wrong}, f"`{name}` {INTEGER}{name}=")
        for name in ("num_machines", "processes_per_machine")
        for wrong in (0, -1, "a", 4.0, True, None)
    ),
    (
        "planning.Cluster",
        {"num_machines": 50_000, "processes_per_machine": 3},
        "50,000 machines have at most 100,000.*: processes_per_machine=3",
    ),
    *(
        ("planning.Cluster", {name: wrong}, f"a positive number.*: {name}=")
        for name in (
            "megabits_per_second",
            "latency_seconds",
            "message_seconds",
            "message_seconds_per_byte",
            "relative_speed",
            "memory_bytes",
        )
        for wrong in (0, -1, "a", True, float("nan"))
    ),
    *(
        (
            "planning.Cluster",
            {"processes_per_processor": wrong},
            "a positive integer or None.*: processes_per_processor=",
        )
        for wrong in (0, "a", 2.0, True)
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
            ("row_bytes", "a positive integer or None", 0, "a", True),
            ("row_bytes", "of a sparse variable a multiple of 4", 6),
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
]
