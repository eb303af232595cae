"""A recommender, DLRM-shaped: tables of many sizes, multi-hot; generated.

python benchmarks/cluster.py --machines 4 benchmarks/workloads/recommender.py
"""

import _common
import keras
import numpy as np

NUM_TABLES, NUM_NUMBERS = 26, 13
SIZES = {
    "small": {"largest": 200_000, "dim": 32, "hot": 4, "batch": 64},
    "large": {"largest": 500_000, "dim": 64, "hot": 8, "batch": 256},
}


def options(add):
    add("--tables", type=int, default=NUM_TABLES)
    add("--smallest", type=int, default=10, help="table's number of rows")
    add("--largest", type=int, help="table's number of rows")
    add("--dim", type=int, help="width of all tables")
    add("--hot", type=int, help="ids of an example in a table")


def make(kit, args, num_examples, generator):
    sizes = np.geomspace(args.smallest, args.largest, args.tables)
    sizes = sizes.round().astype(int)
    numbers = keras.Input((NUM_NUMBERS,))
    ids = keras.Input((args.tables, args.hot), dtype="int32")
    hidden = numbers
    for units in (64, args.dim):
        hidden = keras.layers.Dense(units, activation="relu")(hidden)
    vectors = [hidden]
    for index, size in enumerate(sizes.tolist()):
        bag = kit.bag(size, args.dim, name=f"table_{index}")
        vectors.append(bag(ids[:, index]))
    # Every two of them, as in DLRM.
    stacked = keras.ops.stack(vectors, axis=1)
    products = keras.ops.matmul(
        stacked, keras.ops.transpose(stacked, (0, 2, 1))
    )
    hidden = keras.layers.Concatenate()(
        [hidden, keras.layers.Flatten()(products)]
    )
    for units in (128, 64):
        hidden = keras.layers.Dense(units, activation="relu")(hidden)
    outputs = keras.layers.Dense(1, activation="sigmoid")(hidden)
    drawn = [
        _common.zipf((num_examples, args.hot), size, generator)
        for size in sizes
    ]
    x = (
        generator.random((num_examples, NUM_NUMBERS), "float32"),
        np.stack(drawn, axis=1),
    )
    return _common.Workload(
        keras.Model([numbers, ids], outputs),
        x,
        (x[1][:, :, 0].sum(axis=1, keepdims=True) % 2).astype("float32"),
        "binary_crossentropy",
        keras.optimizers.Adagrad(0.01),
    )


if __name__ == "__main__":
    import _training

    _training.run("recommender")
