"""Models that are called on parts of a batch, ragged and sparse ones too."""

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
