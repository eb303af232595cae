"""A small model, its data, and what stock Keras makes of both.

For the tests of `update`.
"""

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks

ROWS, DIM, IDS = 11, 2, 3
BATCH, STEPS = 6, 4
RATE = 0.05


def identity(gradients, variables):
    del variables
    return gradients


def halve(gradients, variables):
    del variables
    return [tf.math.scalar_mul(0.5, g) for g in gradients]


def examples():
    """All global batches: ids with repeats inside and across ranks."""
    rng = np.random.default_rng(6)
    ids = rng.integers(0, 5, (STEPS * BATCH, IDS)) * 2 % ROWS
    return ids, rng.normal(size=(STEPS * BATCH, 1)).astype("float32")


def start():
    rng = np.random.default_rng(7)
    shapes = [(ROWS, DIM), (ROWS, DIM), (2 * IDS * DIM, 1)]
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


def network(first, second):
    """Of a table, an ordinary embedding and a dense kernel."""
    inputs = keras.Input((IDS,), dtype="int32")
    rows = keras.layers.Concatenate()([first(inputs), second(inputs)])
    outputs = keras.layers.Dense(1, use_bias=False)(
        keras.layers.Flatten()(rows)
    )
    model = keras.Model(inputs, outputs)
    model.set_weights(start())
    return model


def ours(num_partitions=None):
    return network(
        ks.layers.ShardedEmbedding(ROWS, DIM, num_partitions=num_partitions),
        keras.layers.Embedding(ROWS, DIM),
    )


def reference(factors=(1, 1, 1), skipped=()):
    """Stock Keras in one process: each step's dense gradients, the weights.

    Args:
        factors: what the gradient of each variable is multiplied with.
        skipped: steps that are not taken.
    """
    model = network(*(keras.layers.Embedding(ROWS, DIM) for _ in range(2)))
    optimizer = keras.optimizers.SGD(RATE)
    ids, targets = examples()
    seen = []
    for step in range(STEPS):
        if step in skipped:
            continue
        batch = slice(step * BATCH, (step + 1) * BATCH)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids[batch]) - targets[batch]) ** 2)
        gradients = [
            tf.convert_to_tensor(g)
            for g in tape.gradient(loss, model.trainable_variables)
        ]
        seen.append((np.unique(ids[batch]), [g.numpy() for g in gradients]))
        optimizer.apply(
            [f * g for f, g in zip(factors, gradients, strict=True)],
            model.trainable_variables,
        )
    return seen, model.get_weights()
