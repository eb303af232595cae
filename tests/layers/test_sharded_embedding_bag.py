"""Bags of ids against `tf.nn.embedding_lookup_sparse`, and over processes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.layers.bags import COMBINERS
from tests.conftest import engines

ROWS, DIM = 30, 4
BAGS = [[1, 2, 2], [], [3], [0, 7, 0, 9]]
WEIGHTS = [[0.5, 2.0, 1.0], [], [3.0], [1.0, 0.0, -0.5, 2.0]]


def padded(bags, value):
    longest = max(map(len, bags))
    return np.array([bag + [value] * (longest - len(bag)) for bag in bags])


@pytest.mark.parametrize("combiner", COMBINERS)
def test_as_tensorflow_combines(combiner):
    bag = ks.layers.ShardedEmbeddingBag(ROWS, DIM, combiner=combiner)
    ids = tf.ragged.constant(BAGS)
    for weights in (None, tf.ragged.constant(WEIGHTS)):
        sparse = None if weights is None else weights.to_sparse()
        found = bag(ids, weights=weights)
        expected = tf.nn.embedding_lookup_sparse(
            tf.convert_to_tensor(bag.table.variable),
            ids.to_sparse(),
            sparse,
            combiner=combiner,
        )
        expected = np.nan_to_num(expected.numpy())  # of the bag without ids
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        np.testing.assert_allclose(
            bag(ids.to_sparse(), weights=sparse), expected, rtol=1e-6
        )
    # Padding counts as nothing, or with a weight of 0.
    weights = padded(WEIGHTS, 0.0)
    np.testing.assert_allclose(
        bag(padded(BAGS, 5), weights=weights), expected, rtol=1e-6
    )
    twice = bag(padded(BAGS, 5)[np.newaxis], weights=weights[np.newaxis])
    np.testing.assert_allclose(twice[0], expected, rtol=1e-6)
    nested = tf.RaggedTensor.from_row_lengths(ids, [3, 0, 1])
    inner = bag(nested, weights=nested.with_flat_values(sparse.values))
    np.testing.assert_allclose(inner.values, expected, rtol=1e-6)
    assert inner.row_lengths().numpy().tolist() == [3, 0, 1]


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_long_bags_are_summed_in_32_bits(combiner, dtype):
    bag = ks.layers.ShardedEmbeddingBag(ROWS, DIM, combiner=combiner)
    narrow = ks.layers.ShardedEmbeddingBag(
        ROWS, DIM, combiner=combiner, dtype=dtype
    )
    ids = np.arange(3000)[np.newaxis] % ROWS
    rows = np.linspace(-1, 1.5, ROWS * DIM).reshape(ROWS, DIM)
    for layer in (bag, narrow):
        layer.build()
        layer.set_weights([rows])
    expected = bag(ids)
    for given in (ids, tf.RaggedTensor.from_tensor(ids)):
        np.testing.assert_allclose(
            tf.cast(narrow(given), tf.float32), expected, rtol=2e-2
        )


@pytest.mark.parametrize("combiner", COMBINERS)
def test_a_bag_without_ids_gives_zeros(combiner):
    bag = ks.layers.ShardedEmbeddingBag(ROWS, DIM, combiner=combiner)
    with tf.GradientTape() as tape:
        found = bag(tf.ragged.constant([[], [3], [], []], dtype=tf.int32))
        (gradient,) = tape.gradient(found, bag.trainable_weights)
    expected = np.zeros((4, DIM))
    expected[1] = bag(np.array([[3]]))[0]
    np.testing.assert_allclose(found, expected)
    np.testing.assert_array_equal(gradient.indices, [3])
    np.testing.assert_allclose(gradient.values, np.ones((1, DIM)))
    assert bag(np.zeros((2, 0), np.int32)).numpy().tolist() == [[0] * DIM] * 2


def test_zero_is_padding_if_asked():
    bag = ks.layers.ShardedEmbeddingBag(ROWS, DIM, mask_zero=True)
    whole = bag(np.array([[7, 9, 7]]))
    np.testing.assert_allclose(bag(np.array([[0, 7, 9, 7, 0]])), whole)
    assert not bag(np.array([[0, 0]])).numpy().any()
    weights = np.array([[3.0, 1.0]])
    found = bag(np.array([[0, 7]]), weights=weights)
    np.testing.assert_allclose(found, bag(np.array([[7]])))


def test_xla_compiles_bags():
    def losses(jit_compile):
        keras.utils.set_random_seed(1)
        ids = keras.Input((5,), dtype="int32")
        bag = ks.layers.ShardedEmbeddingBag(ROWS, DIM)
        model = keras.Model(ids, keras.layers.Dense(1)(bag(ids)))
        model.compile("sgd", "mse", jit_compile=jit_compile)
        x = np.arange(40, dtype=np.int32).reshape(8, 5) % ROWS
        y = np.ones((8, 1), np.float32)
        return model.fit(x, y, epochs=3, verbose=0).history["loss"]

    np.testing.assert_allclose(losses(True), losses(False), rtol=1e-5)


def train(combiner):
    """Losses and weights of a model of bags, weighted and not."""
    keras.utils.set_random_seed(2)
    strategy = ks.HybridStrategy(architecture="hybrid")
    ids = keras.Input((5,), dtype="int32")
    weights = keras.Input((5,))
    options = {"combiner": combiner, "mask_zero": True}
    plain = ks.layers.ShardedEmbeddingBag(ROWS, DIM, name="plain", **options)
    weighted = ks.layers.ShardedEmbeddingBag(ROWS, DIM, name="w", **options)
    by_name = weighted(weights=weights, inputs=ids)
    both = keras.layers.Concatenate()([plain(ids), by_name])
    model = keras.Model([ids, weights], keras.layers.Dense(1)(both))
    with strategy.scope():
        model.compile(keras.optimizers.Adam(0.05), "mse")
    random = np.random.default_rng(1)
    x = [random.integers(ROWS, size=(32, 5)), random.random((32, 5))]
    history = model.fit(
        x, x[0].sum(axis=1), batch_size=8, shuffle=False, verbose=0
    )
    return history.history["loss"], model.get_weights()


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_several_processes_train_as_one(engine, cluster):
    expected, weights = train("sqrtn")
    for losses, found in cluster(engine, 2).run(train, "sqrtn"):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for one, other in zip(found, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_a_bag_of_padding_has_no_gradient(combiner):
    bag = ks.layers.ShardedEmbeddingBag(
        ROWS, DIM, combiner=combiner, mask_zero=True
    )
    weights = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    with tf.GradientTape() as tape:
        vectors = bag(tf.constant([[0, 0], [1, 2]]), weights=weights)
        total = tf.reduce_sum(vectors * vectors)
    of_padding, of_others = tape.gradient(total, weights).numpy()
    np.testing.assert_array_equal(of_padding, 0)
    assert np.isfinite(of_others).all()
    assert combiner == "mean" or of_others.any()


@pytest.mark.parametrize(
    ("combiner", "axes"),
    list(zip(COMBINERS, [(5,), (3, 5), (2, 3, 5)], strict=True)),
)
def test_exported_and_saved(combiner, axes, tmp_path):
    ids = keras.Input(axes, dtype="int32")
    bag = ks.layers.ShardedEmbeddingBag(
        ROWS, DIM, combiner=combiner, mask_zero=True, name="bag"
    )
    model = keras.Model(ids, keras.layers.Dense(1)(bag(ids)))
    x = np.random.default_rng(0).integers(4, size=(8, *axes))
    x[0] = 0
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.get_layer("bag").combiner == combiner
    for other in (loaded, ks.export(model)):
        np.testing.assert_allclose(other.predict(x, verbose=0), expected)


def test_bags_with_weights_are_not_exported():
    ids, weights = keras.Input((5,), dtype="int32"), keras.Input((5,))
    bag = ks.layers.ShardedEmbeddingBag(ROWS, DIM, name="bag")
    model = keras.Model([ids, weights], bag(ids, weights=weights))
    with pytest.raises(ValueError, match="'bag' is called with weights"):
        ks.export(model)
