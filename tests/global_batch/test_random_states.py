"""Random streams of the ranks."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests.conftest import covering

pytestmark = pytest.mark.smoke


class Noise(keras.layers.Layer):
    """Noise of each kind that needs no seed, in place of its inputs."""

    def call(self, inputs):
        shape = keras.ops.shape(inputs)
        drawn = [
            keras.random.normal(shape),
            keras.random.uniform(shape),
            tf.random.normal(shape),
            tf.random.uniform(shape),
            # In a function of its own, as in a condition.
            tf.cond(
                tf.shape(inputs)[0] > 0,
                lambda: tf.random.normal(shape),
                lambda: tf.zeros(shape),
            ),
        ]
        return keras.ops.concatenate(drawn, axis=1)


def noise(run_eagerly):
    """What steps draw, in their parts of the batch, and what is drawn else."""
    keras.utils.set_random_seed(3)
    strategy = ks.HybridStrategy()
    x = np.zeros((8, 1), "float32")
    noisy = keras.Sequential([Noise(), keras.layers.Dense(1)])
    seen = []

    class Noting(keras.Model):
        def call(self, inputs):
            drawn = noisy.layers[0](inputs)
            tf.numpy_function(
                lambda a: (seen.append(a), np.int64(0))[1], [drawn], tf.int64
            )
            return noisy.layers[1](drawn)

    model = Noting()
    with strategy.scope():
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
    model.fit(x, x, batch_size=8, epochs=2, verbose=0)
    model.evaluate(x, x, batch_size=8, verbose=0)
    outputs = model.predict(x, batch_size=8, verbose=0)
    after = [keras.random.normal((2,)), tf.random.normal((2,))]
    after += [keras.layers.Dense(2).kernel_initializer((2, 2))]
    return [a for a in seen if len(a)], outputs, [np.array(a) for a in after]


@pytest.mark.parametrize(
    ("engine", "run_eagerly"),
    covering(
        itertools.product(("native", "horovod"), (False, True)),
        [("native", True), ("horovod", False)],
    ),
)
def test_each_rank_draws_its_own_noise(cluster, engine, run_eagerly):
    first, second = cluster(engine, 2).run(noise, run_eagerly)
    again, _ = cluster(engine, 2).run(noise, run_eagerly)
    assert len(first[0]) == len(second[0]) >= 4  # steps
    for ours, theirs in zip(first[0], second[0], strict=True):
        assert ours.shape == theirs.shape == (4, 5)
        assert (np.abs(ours - theirs).max(0) > 1e-3).all()
    # Another draw in the next step of training.
    assert (np.abs(first[0][0] - first[0][1]).max(0) > 1e-3).all()
    # A run repeats another, and ranks draw alike outside of a step.
    for ours, others in zip(first[0], again[0], strict=True):
        np.testing.assert_array_equal(ours, others)
    np.testing.assert_array_equal(first[1], second[1])
    for ours, theirs in zip(first[2], second[2], strict=True):
        np.testing.assert_array_equal(ours, theirs)
