"""Functions of ranks that plan a model and train it as planned."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks

WIDTH, EXAMPLES, NUM_ROWS = 8, 12, 1000


def new_model(width=256):
    """A narrow place between small layers and wide ones, without names."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((WIDTH,)),
            keras.layers.Dense(WIDTH, activation="tanh"),
            keras.layers.Dense(2),
            keras.layers.Dense(width, activation="tanh"),
            keras.layers.Dense(width, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def new_recommender(width=256):
    """A sharded table in front of wide layers."""
    keras.utils.set_random_seed(3)
    ids = keras.Input((2,), dtype="int32")
    numbers = keras.Input((WIDTH,))
    rows = ks.layers.ShardedEmbedding(NUM_ROWS, 4, name="rows")(ids)
    first = keras.layers.Dense(2, activation="tanh", name="first")(numbers)
    flat = keras.layers.Flatten(name="flat")(rows)
    x = keras.layers.Concatenate(name="all")([flat, first])
    x = keras.layers.Dense(width, activation="tanh", name="wide")(x)
    model = keras.Model([ids, numbers], keras.layers.Dense(1, name="out")(x))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def new_language_model(width=256):
    """A narrow place between a sharded table and a sampled softmax."""
    keras.utils.set_random_seed(3)
    words = keras.Input((2,), dtype="int32")
    x = ks.layers.ShardedEmbedding(NUM_ROWS, 4, name="rows")(words)
    x = keras.layers.Dense(2, activation="tanh", name="narrow")(x)
    x = keras.layers.Dense(width, activation="tanh", name="wide")(x)
    softmax = ks.layers.SampledSoftmax(
        NUM_ROWS, num_sampled=40, seed=5, name="softmax"
    )
    model = keras.Model(words, softmax(x))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), softmax.loss())
    return model


def text():
    draws = np.random.default_rng(0)
    words = draws.integers(0, NUM_ROWS, (EXAMPLES * 4, 3))
    data = tf.data.Dataset.from_tensor_slices((words[:, :-1], words[:, 1:]))
    return data.batch(EXAMPLES)


def recommender_data():
    draws = np.random.default_rng(0)
    numbers = draws.normal(size=(EXAMPLES * 4, WIDTH)).astype("float32")
    ids = draws.integers(0, NUM_ROWS, (EXAMPLES * 4, 2))
    y = np.sin(ids[:, :1] + numbers[:, :1])
    data = tf.data.Dataset.from_tensor_slices(((ids, numbers), y))
    return data.batch(EXAMPLES)


def data():
    draws = np.random.default_rng(0)
    x = draws.normal(size=(EXAMPLES * 4, WIDTH)).astype("float32")
    y = np.sin(x[:, :1])
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(EXAMPLES)


# How each model is made, and its batches.
MODELS = {
    "dense": (new_model, data),
    "recommender": (new_recommender, recommender_data),
    "language model": (new_language_model, text),
}


def planned_and_trained(rate, name="dense"):
    """Plans for links of a rate, and trains by the best exact strategy.

    Args:
        rate: in Mbit/s; None: as measured.
        name: of `MODELS`. All but the first have sharded tables.

    Returns:
        `(plan without its function, strategy's name, name of the planned
        model's second layer, weights)`.
    """
    communicator = ks.collectives.start()
    cluster = None
    if rate:
        cluster = ks.planning.Cluster(
            communicator.size, megabits_per_second=rate
        )
    make, make_batches = MODELS[name]
    batches, scope = make_batches(), contextlib.nullcontext()
    if name != "dense":
        scope = ks.HybridStrategy().scope()
    with scope:
        planned = make()
    plan = ks.plan(planned, batches, cluster)
    strategy = plan.strategy()
    with strategy.scope():
        model = make()
    model.fit(batches, epochs=2, shuffle=False, verbose=0)
    weights, second = ks.export(model).get_weights(), planned.layers[1].name
    return plan.comparison, type(strategy).__name__, second, weights


@keras.saving.register_keras_serializable("planner_functions")
class Picky(keras.layers.Layer):
    """Refuses a single example, such as a comparison takes of a batch."""

    def call(self, ids):
        number = tf.shape(ids)[0]
        with tf.control_dependencies(
            [tf.debugging.assert_greater(number, 1, "too few examples")]
        ):
            return tf.identity(ids)


def new_picky_model():
    ids = keras.Input((2,), dtype="int32")
    x = keras.layers.Embedding(50, 4, name="rows")(Picky(name="picky")(ids))
    model = keras.Model(ids, keras.layers.Dense(1, name="out")(x))
    model.compile("sgd", "mse")
    return model


def picky_data():
    ids = 1 + np.arange(24).reshape(12, 2)
    return tf.data.Dataset.from_tensors((ids, np.zeros((12, 2, 1))))


def planned_and_not_compared():
    """Plans a model whose layers refuse to be measured, and trains it.

    Returns:
        `(costs, failures, the strategy's error, loss)`.
    """
    plan = ks.plan(new_picky_model(), picky_data())
    error = None
    try:
        plan.strategy()
    except ValueError as raised:
        error = str(raised)
    with ks.HybridStrategy().scope():
        model = new_picky_model()
    (loss,) = model.fit(picky_data(), verbose=0).history["loss"]
    return plan.strategies, plan.comparison.failures, error, loss


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
