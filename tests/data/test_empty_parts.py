"""Models that are called on parts of a batch, ragged and sparse ones too."""

import inspect
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests import oracles
from tests.conftest import engines

ROWS, DIM = 20, 3


class OfRagged(keras.Model):
    """Subclassed; reads a ragged batch as such."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding(ROWS, DIM)
        self.head = keras.layers.Dense(1)

    def build(self, input_shape=None):
        self.embedding.build(None)
        self.head.build((None, DIM))
        self.built = True

    def call(self, ids):
        if not isinstance(ids, tf.RaggedTensor):  # when Keras asks for shapes
            return self.head(tf.zeros([tf.shape(ids)[0], DIM]))
        rows = tf.ragged.map_flat_values(self.embedding, ids)
        while rows.ragged_rank > 1:
            rows = tf.reduce_sum(rows, axis=2)
        return self.head(tf.reduce_mean(rows, axis=1))


class OfSparse(OfRagged):
    """And a sparse one."""

    def call(self, features):
        if isinstance(features, tf.SparseTensor):
            features = tf.sparse.to_dense(features)
        ids = tf.range(ROWS)
        return self.head(tf.matmul(features, self.embedding(ids)))


def inputs(kind):
    rng = np.random.default_rng(3)
    if kind == "sparse":
        dense = rng.random((8, ROWS)) * (rng.random((8, ROWS)) < 0.3)
        return tf.sparse.from_dense(dense.astype("float32"))
    rows = [rng.integers(0, ROWS, 1 + i % 4).tolist() for i in range(8)]
    if kind == "nested":
        rows = [[row, row[:1]] for row in rows]
    return tf.ragged.constant(rows, dtype=tf.int32)


def trained(kind, embedding, prepare, as_dataset):
    keras.utils.set_random_seed(5)
    model = (OfSparse if kind == "sparse" else OfRagged)(embedding)
    model.build()
    prepare(model)
    x = inputs(kind)
    y = np.linspace(-1, 1, 8, dtype="float32")[:, None]
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    given = (data,) if as_dataset else (x, y)
    options = {} if as_dataset else {"batch_size": 4, "shuffle": False}
    history = model.fit(*given, epochs=2, verbose=0, **options).history
    options.pop("shuffle", None)
    return (
        history["loss"],
        history["mae"],
        *model.get_weights(),
        *([] if kind == "ragged" else evaluated(model, data, given, options)),
    )


def evaluated(model, data, given, options):
    yield model.evaluate(*given, verbose=0, **options)
    yield model.predict(data.map(lambda x, y: x), verbose=0)


CASES = [
    # Keras takes ragged tensors as arrays in no version, and makes a dataset of
    # sparse ones.
    ("nested", True),
    ("sparse", False),
]
# What holds of lists in lists holds of lists.
MORE_CASES = [("ragged", True)]


def on_ranks(cases):
    strategy = ks.HybridStrategy()

    def prepare(model):
        with strategy.scope():
            model.compile(keras.optimizers.Adagrad(0.1), "mse", metrics=["mae"])

    return [
        trained(kind, ks.layers.ShardedEmbedding, prepare, as_dataset)
        for kind, as_dataset in cases
    ]


@pytest.mark.parametrize("engine", engines(usually="native"))
@pytest.mark.filterwarnings("ignore:.*shuffle=True.*:UserWarning")
@pytest.mark.filterwarnings("ignore:Converting sparse:UserWarning")
@pytest.mark.parametrize(
    "cases",
    [CASES, pytest.param(MORE_CASES, marks=pytest.mark.all_cells)],
    ids=lambda cases: cases[0][0],
)
def test_ragged_and_sparse_batches(cluster, engine, cases):
    def prepare(model):
        oracles.dense_reference(
            model, keras.optimizers.Adagrad(0.1), loss="mse", metrics=["mae"]
        )

    ranks = cluster(engine, 2).run(on_ranks, cases, timeout=200)
    for (kind, as_dataset), *results in zip(cases, *ranks, strict=True):
        expected = trained(kind, keras.layers.Embedding, prepare, as_dataset)
        for got in results:
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_allclose(a, b, atol=2e-5, err_msg=kind)


RENORM_BATCHES = (5, 5, 1)
MOMENTUM, RENORM_MOMENTUM, EPSILON = 0.5, 0.75, 1e-3


def renorm_examples():
    rng = np.random.default_rng(9)
    return rng.normal(1, 2, (sum(RENORM_BATCHES), DIM)).astype("float32")


def statistics_of_renorm():
    """The layer's statistics after an epoch, by their names."""
    norm = keras.layers.BatchNormalization(
        renorm=True,
        renorm_momentum=RENORM_MOMENTUM,
        momentum=MOMENTUM,
        epsilon=EPSILON,
    )
    model = keras.Sequential([keras.Input((DIM,)), norm])
    with ks.HybridStrategy().scope():
        model.compile("sgd", "mse")
    x = renorm_examples()
    model.fit(x, x, RENORM_BATCHES[0], shuffle=False, verbose=0)
    return {v.name: v.numpy() for v in norm.non_trainable_variables}


def expected_statistics(size):
    """The same by NumPy: each part moves them, and they become the mean."""
    found = {
        "moving_mean": np.zeros(DIM),
        "moving_variance": np.ones(DIM),
        "moving_stddev": np.ones(DIM),
        "renorm_mean": np.zeros(DIM),
        "renorm_stddev": np.ones(DIM),
    }

    def moved(name, momentum, new):
        return found[name] * momentum + new * (1 - momentum)

    x, start = renorm_examples(), 0
    for count in RENORM_BATCHES:
        ends = [start + rank * count // size for rank in range(size + 1)]
        start += count
        new = dict.fromkeys(found, 0.0)
        for part in (x[a:b] for a, b in itertools.pairwise(ends) if a < b):
            mean = part.mean(0)
            stddev = np.sqrt(part.var(0) + EPSILON)
            moving_stddev = moved("moving_stddev", MOMENTUM, stddev)
            of_part = {
                "moving_mean": moved("moving_mean", MOMENTUM, mean),
                "moving_variance": moving_stddev**2 - EPSILON,
                "moving_stddev": moving_stddev,
                "renorm_mean": moved("renorm_mean", RENORM_MOMENTUM, mean),
                "renorm_stddev": moved(
                    "renorm_stddev", RENORM_MOMENTUM, stddev
                ),
            }
            for name, value in of_part.items():
                new[name] += value * len(part) / count
        found = new
    return found


@pytest.mark.skipif(
    "renorm"
    not in inspect.signature(keras.layers.BatchNormalization).parameters,
    reason="this Keras's BatchNormalization has no renorm",
)
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_all_statistics_of_renorm_are_the_parts_mean(cluster, engine):
    expected = expected_statistics(2)
    ranks = cluster(engine, 2).run(statistics_of_renorm)
    for name, value in expected.items():
        for found in ranks:
            np.testing.assert_array_equal(found[name], ranks[0][name], name)
            np.testing.assert_allclose(
                found[name], value, rtol=1e-5, atol=1e-6, err_msg=name
            )
