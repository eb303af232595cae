"""A recommender, DLRM-shaped: tables of many sizes, multi-hot; generated.

python benchmarks/cluster.py --machines 4 benchmarks/workloads/recommender.py
"""

import _training
import keras
import numpy as np

import keras_sparsity as ks

NUM_TABLES, NUM_NUMBERS = 26, 13


def make(args, num_examples, generator):
    sizes = np.geomspace(args.smallest, args.largest, args.tables).astype(int)
    numbers = keras.Input((NUM_NUMBERS,))
    ids = keras.Input((args.tables, args.hot), dtype="int32")
    hidden = numbers
    for units in (64, args.dim):
        hidden = keras.layers.Dense(units, activation="relu")(hidden)
    vectors = [hidden]
    for index, size in enumerate(sizes.tolist()):
        bag = ks.layers.ShardedEmbeddingBag(
            size, args.dim, combiner="sum", name=f"table_{index}"
        )
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
    model = keras.Model([numbers, ids], outputs)
    x = [
        generator.random((num_examples, NUM_NUMBERS), "float32"),
        np.stack(
            [
                _training.zipf((num_examples, args.hot), size, generator)
                for size in sizes
            ],
            axis=1,
        ).astype("int32"),
    ]
    y = (x[1][:, :, 0].sum(axis=1, keepdims=True) % 2).astype("float32")
    optimizer = keras.optimizers.Adagrad(0.01)
    return model, x, y, "binary_crossentropy", optimizer, 1


def options():
    parser = _training.options(__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--tables", type=int, default=NUM_TABLES)
    add("--smallest", type=int, default=10, help="table's number of rows")
    add("--largest", type=int, default=200_000, help="table's number of rows")
    add("--dim", type=int, default=32, help="width of all tables")
    add("--hot", type=int, default=4, help="ids of an example in a table")
    return parser


if __name__ == "__main__":
    _training.run(make, options())
