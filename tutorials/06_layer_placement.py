"""Layers on one worker: activations travel in place of gradients.

    keras-sparsity run -n 3 tutorials/06_layer_placement.py

Two processes train the convolutions, each on half of the batch; the third one
holds the wide layers behind them. This script plans a small VGG, trains it on
images of stripes, and compares it with one process.
"""

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks

CLASSES, SIDE, BATCH = 8, 24, 32


def stripes(number, seed):
    """Images of stripes in noise, and which of 8 angles the stripes have."""
    draws = np.random.default_rng(seed)
    angles = draws.integers(0, CLASSES, number)
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    turned = np.pi * angles[:, None, None] / CLASSES
    places = x * np.cos(turned) + y * np.sin(turned)
    phases = draws.uniform(0, 2 * np.pi, (number, 1, 1))
    images = np.sin(30 * places + phases) + draws.normal(size=places.shape)
    return images[..., None].astype("float32"), angles


def new_model():
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input((SIDE, SIDE, 1))
    for number, units in enumerate((8, 16, 32)):
        x = keras.layers.Conv2D(
            units, 3, activation="relu", padding="same", name=f"conv_{number}"
        )(x)
        x = keras.layers.MaxPooling2D(name=f"pool_{number}")(x)
    x = keras.layers.Flatten(name="flat")(x)
    x = keras.layers.Dense(512, activation="relu", name="wide")(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="angle")(x))


def compiled(model):
    model.compile(
        keras.optimizers.Adam(0.002),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


# --- Head and tail --------------------------------------------------------
# Inside of the scope, `compile` divides the model. By the paper's rule, where
# its activations and the parameters in front of them are fewest: after the last
# pooling. By default it looks for the shortest predicted step, which depends on
# the links: among processes of one machine there is little to gain.
strategy = ks.LayerPlacementStrategy(rule="published")
with strategy.scope():
    model = compiled(new_model())

# --- The plan -------------------------------------------------------------
# Every place where the model could be divided: what the busiest link carries in
# a step, and the predicted time, beside those of data parallelism.
images, angles = stripes(2048, seed=0)
dataset = tf.data.Dataset.from_tensor_slices((images, angles)).batch(BATCH)
plan = ks.plan(model, dataset)

# --- Training -------------------------------------------------------------
# Weights are updated once a batch, with the gradients of all examples, as one
# process does. `evaluate` and `predict` give the same on every process.
model.fit(dataset, epochs=2, verbose=0)
unseen = stripes(512, seed=1)
_, accuracy = model.evaluate(*unseen, verbose=0)

alone = compiled(new_model())
alone.fit(dataset, epochs=2, verbose=0)
_, expected = alone.evaluate(*unseen, verbose=0)
if strategy.rank == 0:
    print(f"{strategy.size} processes: accuracy {accuracy:.3f}")
    print(f"one process: accuracy {expected:.3f}")

# --- Saving ---------------------------------------------------------------
# Every process calls `save`; rank 0 writes an ordinary Keras model.
model.save("placed.keras")
whole = keras.models.load_model("placed.keras")
np.testing.assert_allclose(
    whole.predict(unseen[0], verbose=0),
    model.predict(unseen[0], verbose=0),
    atol=1e-3,
)
if strategy.rank == 0:
    print("saved and loaded: both predict the same")
