"""Functions of ranks that plan a model and train it as planned."""

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks

WIDTH, EXAMPLES = 8, 12


def new_model(width=256):
    """A narrow place between small layers and wide ones."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            keras.layers.Dense(WIDTH, activation="tanh", name="first"),
            keras.layers.Dense(2, name="narrow"),
            keras.layers.Dense(width, activation="tanh", name="wide"),
            keras.layers.Dense(width, activation="tanh", name="wider"),
            keras.layers.Dense(1, name="out"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def data():
    draws = np.random.default_rng(0)
    x = draws.normal(size=(EXAMPLES * 4, WIDTH)).astype("float32")
    y = np.sin(x[:, :1])
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(EXAMPLES)


def planned_and_trained(rate):
    """Plans for links of a rate, and trains by the best exact strategy.

    Returns:
        `(plan without its function, strategy's name and cuts, weights)`.
    """
    communicator = ks.collectives.start()
    cluster = None
    if rate:
        cluster = ks.planning.Cluster(
            communicator.size, megabits_per_second=rate
        )
    plan = ks.plan(new_model(), data(), cluster)
    strategy = plan.strategy()
    with strategy.scope():
        model = new_model()
    model.fit(data(), epochs=2, shuffle=False, verbose=0)
    cuts = getattr(strategy, "stages", None)
    weights = ks.export(model).get_weights()
    return plan.comparison, type(strategy).__name__, cuts, weights
