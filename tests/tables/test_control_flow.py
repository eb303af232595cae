"""Tables in loops and branches of a step, against stock Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests import oracles
from tests.conftest import engines

ROWS, DIM, LENGTH = 30, 4, 5


class Cell(keras.layers.Layer):
    """An RNN's cell that embeds its ids."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding(ROWS, DIM, name="cell")
        self.dense = keras.layers.Dense(DIM)
        self.state_size = self.output_size = DIM

    def build(self, input_shape):
        self.embedding.build(input_shape)
        self.dense.build((None, 2 * DIM))
        self.built = True

    def call(self, ids, states):
        rows = self.embedding(keras.ops.cast(ids[:, 0], "int32"))
        both = keras.ops.concatenate([rows, states[0]], axis=-1)
        outputs = keras.ops.tanh(self.dense(both))
        return outputs, [outputs]


class Loops(keras.layers.Layer):
    """A loop in a loop, a branch, and a call outside of both."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding(ROWS, DIM, name="loops")

    def build(self, input_shape):
        self.embedding.build(input_shape)
        self.built = True

    def call(self, ids):
        ids = tf.cast(ids, tf.int32)
        total = tf.zeros([tf.shape(ids)[0], DIM])

        def outer(i, total):
            def inner(j, total):
                return j + 1, total + self.embedding((ids[:, i] + j) % ROWS)

            _, total = tf.while_loop(lambda j, _: j < i, inner, [0, total])
            return i + 1, tf.tanh(total + self.embedding(ids[:, i]))

        _, total = tf.while_loop(
            lambda i, _: i < LENGTH,
            outer,
            [0, total],
            shape_invariants=[tf.TensorShape([]), tf.TensorShape([None, DIM])],
        )
        branch = tf.cond(
            tf.reduce_sum(tf.cast(ids, tf.float32)) > -1.0,
            lambda: self.embedding(ids[:, 0]) * 2.0,
            lambda: tf.zeros_like(total),
        )
        total.set_shape([None, DIM])
        branch.set_shape([None, DIM])
        return total + branch + self.embedding(ids[:, 1])

    def compute_output_shape(self, input_shape):
        return (input_shape[0], DIM)


def in_cell(embedding):
    inputs = keras.Input((None, 1), dtype="int32")
    hidden = keras.layers.RNN(Cell(embedding))(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def in_loops(embedding):
    inputs = keras.Input((LENGTH,), dtype="int32")
    return keras.Model(inputs, keras.layers.Dense(1)(Loops(embedding)(inputs)))


def batches(make):
    rng = np.random.default_rng(0)
    shape = (22, LENGTH, 1) if make is in_cell else (22, LENGTH)
    x = oracles.zipf_ids(rng, ROWS, shape).astype("int32")
    return x, rng.normal(size=(22, 1)).astype("float32")


def trained(make, embedding, prepare, **compile_arguments):
    keras.utils.set_random_seed(5)
    model = make(embedding)
    prepare(model, **compile_arguments)
    x, y = batches(make)
    # The last batch has an odd number of examples.
    history = model.fit(
        x, y, batch_size=7, epochs=2, shuffle=False, verbose=0
    ).history
    return model, (
        history,
        model.get_weights(),
        model.evaluate(x, y, batch_size=7, verbose=0),
        model.predict(x, batch_size=7, verbose=0),
    )


def on_ranks(architectures):
    results = []
    for architecture in architectures:
        strategy = ks.HybridStrategy(architecture=architecture)

        def prepare(model, strategy=strategy, **options):
            optimizer = keras.optimizers.Adam(0.01)
            with strategy.scope():
                model.compile(optimizer, "mse", **options)

        is_first = architecture == "hybrid"
        for make in (in_cell, in_loops)[: 2 if is_first else 1]:
            options = {"steps_per_execution": 2} if make is in_loops else {}
            _, result = trained(
                make, ks.layers.ShardedEmbedding, prepare, **options
            )
            results.append((make, result))
    return results


# Gradients of whole tables are gathered, or summed, behind the loop.
@pytest.mark.parametrize(
    "architectures",
    [
        ("hybrid", "allreduce"),
        pytest.param(("allgather",), marks=pytest.mark.all_cells),
    ],
    ids=lambda architectures: architectures[0],
)
@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_tables_in_loops(cluster, engine, architectures):
    def prepare(model):
        oracles.dense_reference(model, keras.optimizers.Adam(0.01), loss="mse")

    expected = {
        make: trained(make, keras.layers.Embedding, prepare)[1]
        for make in (in_cell, in_loops)
    }
    for results in cluster(engine, 2).run(on_ranks, architectures):
        assert len(results) == len(architectures) + ("hybrid" in architectures)
        for make, (history, weights, evaluated, predicted) in results:
            a, b, c, d = expected[make]
            np.testing.assert_allclose(history["loss"], a["loss"], 1e-4)
            for x, y in zip(weights, b, strict=True):
                np.testing.assert_allclose(x, y, atol=2e-5)
            np.testing.assert_allclose(evaluated, c, 1e-4)
            np.testing.assert_allclose(predicted, d, atol=2e-5)


def custom_loops():
    """Sequences of another length on each rank; updates within a loop."""
    strategy = ks.HybridStrategy()
    keras.utils.set_random_seed(5)
    model = in_cell(ks.layers.ShardedEmbedding)
    start = model.get_weights()
    with strategy.scope():
        optimizer = ks.HybridOptimizer(keras.optimizers.SGD(0.5))
    rank = strategy.rank
    x, _ = batches(in_cell)
    mine = x[rank::2, : 2 + 3 * rank]

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(ids, training=True)) / strategy.size
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    @tf.function
    def steps(ids):  # a loop over steps is none within a step
        for _ in tf.range(2):
            strategy.run(step, args=(ids,))

    steps(tf.constant(mine))
    weights = model.get_weights()

    @tf.function
    def within(ids):
        def steps(ids):
            for _ in tf.range(2):
                step(ids)

        strategy.run(steps, args=(ids,))

    try:
        within(tf.constant(mine))
        message = None
    except ValueError as error:
        message = str(error)
    return start, weights, message


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_loops_of_other_lengths_and_updates_in_them(cluster, engine):
    keras.utils.set_random_seed(5)
    model = in_cell(keras.layers.Embedding)
    results = cluster(engine, 2).run(custom_loops)
    model.set_weights(results[0][0])
    x, _ = batches(in_cell)
    optimizer = keras.optimizers.SGD(0.5)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.add_n(
                [
                    tf.reduce_mean(model(x[r::2, : 2 + 3 * r])) / 2
                    for r in range(2)
                ]
            )
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = [tf.convert_to_tensor(g) for g in gradients]
        optimizer.apply(gradients, model.trainable_variables)
    for _, weights, message in results:
        for a, b in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)
        assert "is trained inside of a loop" in message
