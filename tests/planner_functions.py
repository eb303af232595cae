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


def planned_under_hybrid():
    """Plans a model that a `HybridStrategy` trains already, and goes on.

    Returns:
        `(plan without its function, whether weights changed by it, loss)`.
    """
    ids = keras.Input((3,), dtype="int32")
    strategy = ks.HybridStrategy()
    with strategy.scope():
        x = keras.layers.Embedding(40_000, 4, name="rows")(ids)
        x = keras.layers.Flatten(name="flat")(x)
        x = keras.layers.BatchNormalization(synchronized=True, name="norm")(x)
        x = keras.layers.Dropout(0.5, name="drop")(x)
        model = keras.Model(ids, keras.layers.Dense(1, name="out")(x))
        model.compile("adam", "mse")
    draws = np.random.default_rng(0)
    data = tf.data.Dataset.from_tensors(
        (draws.integers(0, 40_000, (EXAMPLES, 3)), np.zeros((EXAMPLES, 1)))
    )
    model.fit(data, verbose=0)
    before = model.get_weights()
    plan = ks.plan(model, data)
    is_changed = not all(map(np.array_equal, before, model.get_weights()))
    (loss,) = model.fit(data, verbose=0).history["loss"]
    return plan.comparison, is_changed, loss
