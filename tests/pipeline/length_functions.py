"""Functions of tests with sequences of lengths that no trace knows."""

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from tests import pipeline_oracle

LENGTHS = (5, 2, 7, 3, 6)
CUTS = ["dense_0", "dense_1"]
# In halves, whose shares float32 has exactly.
_SIZES = (6, 6, 2, 6, 4)


def made():
    """A model whose layers before the last one keep the lengths."""
    keras.utils.set_random_seed(3)
    options = {"dtype": "float64"}
    x = inputs = keras.Input((None, 4), **options)
    for i in range(3):
        x = keras.layers.Dense(5, "tanh", name=f"dense_{i}", **options)(x)
    x = keras.layers.GlobalAveragePooling1D(name="mean", **options)(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="out", **options)(x))


def batches():
    """List of `(x, y)`, whose sequences get longer and shorter."""
    draws = np.random.default_rng(1)
    return [
        (draws.normal(size=(size, length, 4)), draws.normal(size=(size, 2)))
        for size, length in zip(_SIZES, LENGTHS, strict=True)
    ]


def trained(rule, schedule, num_micro_batches, messages_ahead=False):
    """All weights after an epoch, and its loss."""
    keras.config.set_floatx("float64")
    try:
        strategy = ks.PipelineStrategy(
            schedule,
            CUTS,
            num_micro_batches,
            **pipeline_oracle.of_prediction(schedule, "paper"),
            messages_ahead=messages_ahead,
        )
        model = made()
        with strategy.scope():
            model.compile(
                pipeline_oracle.RULES[rule](),
                keras.losses.MeanSquaredError(dtype="float64"),
            )
        data = tf.data.Dataset.from_generator(
            batches,
            output_signature=(
                tf.TensorSpec([None, None, 4], tf.float64),
                tf.TensorSpec([None, 2], tf.float64),
            ),
        )
        history = model.fit(data, verbose=0).history
        return model.get_weights(), history["loss"]
    finally:
        keras.config.set_floatx("float32")
