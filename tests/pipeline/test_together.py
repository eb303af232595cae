"""Sums that the layers of a stage make over its ranks."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks

# Of each strategy, the groups of examples that are normalized together, of
# the mini-batches that are trained. All have stand-ins: with fewer examples
# than parts, and with micro-batches of which no rank has an example.
_CASES = {
    # Three workers.
    "placed": [[[0, 1, 2, 3, 4]], [[0, 1]]],
    # Two replicas, each of two micro-batches.
    "1f1b": [[[0, 2], [1]], [[0]]],
    # Two micro-batches, of which each replica has a piece.
    "vanilla": [[[0, 1], [2]], [[0]]],
}


def _model():
    keras.utils.set_random_seed(3)
    layers = [keras.Input((4,))]
    for name in ("first", "second"):
        layers += [
            keras.layers.Dense(5, activation="tanh", name=name),
            keras.layers.BatchNormalization(
                synchronized=True, name=f"norm_of_{name}"
            ),
        ]
    return keras.Sequential([*layers, keras.layers.Dense(2, name="out")])


def _batches(name):
    draws = np.random.default_rng(1)
    for groups in _CASES[name]:
        number = sum(map(len, groups))
        yield groups, draws.normal(size=(2, number, 4)).astype("float32")


def trained(name):
    """Losses, and weights after the mini-batches, each an epoch of its own."""
    cuts = ["norm_of_first"]
    strategy = (
        ks.LayerPlacementStrategy(cuts)
        if name == "placed"
        else ks.PipelineStrategy(name, cuts, num_micro_batches=2, replicas=2)
    )
    model, losses = _model(), []
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.5), "mse")
    for _, (x, y) in _batches(name):
        fitted = model.fit(x, y[:, :2], batch_size=8, verbose=0, shuffle=False)
        losses += fitted.history["loss"]
    weights = ks.export(model).trainable_weights
    return losses, [v.numpy() for v in weights]


def _expected(name):
    """As `trained`, of stock Keras in one process."""
    model, optimizer, losses = _model(), keras.optimizers.SGD(0.5), []
    for groups, (x, y) in _batches(name):
        with tf.GradientTape() as tape:
            sums = [
                tf.reduce_sum(
                    (model(x[each], training=True) - y[each, :2]) ** 2
                )
                for each in groups
            ]
            loss = tf.add_n(sums) / (2 * len(x))
        weights = model.trainable_weights
        optimizer.apply(tape.gradient(loss, weights), weights)
        losses.append(float(loss))
    return losses, [v.numpy() for v in model.trainable_weights]


@pytest.mark.parametrize("name", list(_CASES))
def test_stand_ins_are_no_part_of_batch_statistics(cluster, name):
    losses, weights = _expected(name)
    ranks = cluster("native", 4, has_groups=True).run(trained, name)
    for found, of_rank in ranks:
        # Statistics of two examples enlarge rounding, on some processors
        # to 2e-5; a stand-in that counted would be of the losses' size.
        np.testing.assert_allclose(found, losses, rtol=1e-4)
        for value, expected in zip(of_rank, weights, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=2e-5)
