"""A recommender, DLRM-shaped: tables of many sizes, multi-hot; generated.

python benchmarks/cluster.py --machines 4 benchmarks/workloads/recommender.py
"""

import functools

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
    _common.target_options(add)


class Recommender(keras.Model):
    """The model.

    Args:
        bag: the `Kit`'s layer of a table.
        sizes: the tables' numbers of rows.
        dim: their width.
    """

    def __init__(self, bag, sizes, dim):
        super().__init__()
        dense = functools.partial(keras.layers.Dense, activation="relu")
        self.of_numbers = [dense(units) for units in (64, dim)]
        self.tables = [
            bag(size, dim, name=f"table_{index}")
            for index, size in enumerate(sizes.tolist())
        ]
        self.top = [dense(units) for units in (128, 64)]
        self.last = keras.layers.Dense(1, activation="sigmoid")

    def call(self, inputs):
        hidden, ids = inputs
        for layer in self.of_numbers:
            hidden = layer(hidden)
        vectors = [hidden]
        for index, table in enumerate(self.tables):
            vectors.append(table(ids[:, index]))
        # Every two of them, as in DLRM.
        stacked = keras.ops.stack(vectors, axis=1)
        products = keras.ops.matmul(
            stacked, keras.ops.transpose(stacked, (0, 2, 1))
        )
        products = keras.ops.reshape(products, (-1, len(vectors) ** 2))
        hidden = keras.ops.concatenate([hidden, products], axis=1)
        for layer in self.top:
            hidden = layer(hidden)
        return self.last(hidden)


def make(kit, args, num_examples, generator, is_functional=True):
    sizes = np.geomspace(args.smallest, args.largest, args.tables)
    sizes = sizes.round().astype(int)
    model = Recommender(kit.bag, sizes, args.dim)
    if is_functional:
        inputs = [
            keras.Input((NUM_NUMBERS,)),
            keras.Input((args.tables, args.hot), dtype="int32"),
        ]
        model = keras.Model(inputs, model.call(inputs))
    drawn = [
        _common.zipf((num_examples, args.hot), size, generator)
        for size in sizes
    ]
    x = (
        generator.random((num_examples, NUM_NUMBERS), "float32"),
        np.stack(drawn, axis=1),
    )
    y, least_loss = x[1][:, :, 0].sum(axis=1, keepdims=True) % 2, None
    if args.target is not None:  # to which nobody learns a parity
        source = Source(sizes, generator)
        y, least_loss = source.labels(x, generator), source.least_loss
    return _common.Workload(
        model,
        x,
        y.astype("float32"),
        "binary_crossentropy",
        keras.optimizers.Adagrad(0.01),
        least_loss=least_loss,
    )


class Source:
    """A source of labels: each id has a weight, whose sum is a logit.

    Args:
        sizes: the tables' numbers of rows.
        generator: NumPy's, to draw the weights.
    """

    def __init__(self, sizes, generator):
        self._weights = [generator.normal(size=size) for size in sizes]

    def labels(self, x, generator):
        probability = self._probability(x)
        return generator.random(probability.shape) < probability

    def least_loss(self, x, y):
        """Mean of -log of the probability of each label."""
        probability = self._probability(x)
        return float(-np.log(np.where(y, probability, 1 - probability)).mean())

    def _probability(self, x):
        logits = sum(
            weights[ids].sum(axis=-1)
            for weights, ids in zip(
                self._weights, x[1].swapaxes(0, 1), strict=True
            )
        )
        return 1 / (1 + np.exp(-logits[:, np.newaxis] / x[1].shape[1] ** 0.5))


if __name__ == "__main__":
    import _training

    _training.run("recommender")
