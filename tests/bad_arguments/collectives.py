"""Wrong arguments of collectives."""

import tensorflow as tf

from tests.public_calls import Unpicklable

NO_TENSOR = "received {}.*Expected a tensor.*gather_objects"
NAME = "`name` must be a string.*the same on all ranks.*Received: name=3"

BAD = [
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
        ("collectives.Collectives.all_gather", {"counts": wrong}, message)
        for wrong, message in [
            ([3], r"rank, 0, the number.*Received the count \[3\].*of 2 rows"),
            ([1, 1], r"counts of shape \(2,\). Expected \(1,\).*rows of each"),
            ([2.0], "counts of dtype float32. Expected integers"),
            ("a", "counts of dtype string. Expected integers"),
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
]
