"""Which strategy: all ways to train a model, compared before training.

    keras-sparsity run -n 2 tutorials/07_which_strategy.py

`ks.plan` measures a model's layers and predicts the step of data parallelism,
layer placement and pipelines. This script plans a small network for slow links
and for this machine, trains it by the best strategy, and compares it with one
process. For a saved model and machines that are not there,

    keras-sparsity plan striped.keras --machines 1000 --rate 1000 --latency 0.1

prints the same table.
"""

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks

CLASSES, SIDE, BATCH = 8, 24, 64
communicator = ks.collectives.start()


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
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, name="angle")(x))
    model.compile(
        keras.optimizers.Adam(0.002),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


# --- A described cluster --------------------------------------------------
# Two machines with a processor each and links of 20 Mbit/s. Below the table of
# the variables is that of all ways to train the model, the fastest first.
images, angles = stripes(2048, seed=0)
dataset = tf.data.Dataset.from_tensor_slices((images, angles)).batch(BATCH)
slow = ks.planning.Cluster(
    2,
    megabits_per_second=20,
    latency_seconds=1e-3,
    processes_per_processor=1,
)
plan = ks.plan(new_model(), dataset, slow)
if communicator.rank == 0:
    best = next(cost for cost in plan.strategies if cost.is_exact)
    print(f"at 20 Mbit/s the best exact one: {best.way}, bound: {best.bound}")

# --- This machine ---------------------------------------------------------
# Without a cluster, the links between the running processes are measured, and
# the processes share the cores.
plan = ks.plan(new_model(), dataset)

# --- The strategy ---------------------------------------------------------
# The fastest one that gives the result of one process. Pipelines whose passes
# miss updates come into question with `plan.strategy(asynchronous=True)`.
strategy = plan.strategy()
with strategy.scope():
    model = new_model()
model.fit(dataset, epochs=2, verbose=0)
unseen = stripes(512, seed=1)
_, accuracy = model.evaluate(*unseen, verbose=0)

alone = new_model()
alone.fit(dataset, epochs=2, verbose=0)
_, expected = alone.evaluate(*unseen, verbose=0)
if communicator.rank == 0:
    print(f"trained by a {type(strategy).__name__}")
    print(f"{communicator.size} processes: accuracy {accuracy:.3f}")
    print(f"one process: accuracy {expected:.3f}")
    alone.save("striped.keras")
