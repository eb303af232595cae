"""N processes give what one process gives with the dense gradient."""

import functools

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests import oracles
from tests.conftest import engines

VOCABULARY = 60
STEPS = 20
BATCH = 16
TOLERANCE = 1e-4

OPTIMIZERS = {
    "sgd": {"class_name": "SGD", "config": {"learning_rate": 0.5}},
    "momentum": {
        "class_name": "SGD",
        "config": {"learning_rate": 0.1, "momentum": 0.9},
    },
    "adagrad": {"class_name": "Adagrad", "config": {"learning_rate": 0.1}},
    "rmsprop": {"class_name": "RMSprop", "config": {"learning_rate": 0.01}},
    # A larger epsilon than the default: it keeps Adam from turning a gradient
    # that is rounding noise into a full step.
    "adam": {
        "class_name": "Adam",
        "config": {"learning_rate": 0.01, "epsilon": 1e-4},
    },
}
CLIPS = (None, 0.05)  # global_clipnorm
PARTITIONS = (1, 2, 3, 8)


def optimizer(name, clip):
    spec = OPTIMIZERS[name]
    return keras.optimizers.get(
        {**spec, "config": {**spec["config"], "global_clipnorm": clip}}
    )


def data():
    rng = np.random.default_rng(7)
    ids = oracles.zipf_ids(rng, VOCABULARY, (STEPS * BATCH, 6))
    extra = oracles.zipf_ids(rng, VOCABULARY, (STEPS * BATCH, 3))
    labels = rng.integers(0, 4, (STEPS * BATCH,))
    return (ids, extra), labels


def model(embedding, partitions=None):
    """Tables of each number of partitions, one called twice, and others."""
    keras.utils.set_random_seed(3)
    first = keras.Input((6,), dtype="int32")
    second = keras.Input((3,), dtype="int32")
    pool = keras.layers.GlobalAveragePooling1D()
    features = [
        pool(keras.layers.Embedding(VOCABULARY, 3, name="ordinary")(second))
    ]
    for count in PARTITIONS:
        options = {"num_partitions": count} if partitions else {}
        table = embedding(VOCABULARY, 4, name=f"table_{count}", **options)
        features.append(pool(table(first)))
        if count == PARTITIONS[-1]:
            features.append(pool(table(second)))
    hidden = keras.layers.Dense(8, activation="tanh", name="hidden")(
        keras.layers.Concatenate()(features)
    )
    outputs = keras.layers.Dense(4, activation="softmax", name="out")(hidden)
    return keras.Model([first, second], outputs)


LOSS = "sparse_categorical_crossentropy"


def fit(built):
    x, y = data()
    built.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)


@functools.cache
def reference(name, clip):
    """Weights before and after, in one process, by stock Keras."""
    stock = model(keras.layers.Embedding)
    start = stock.get_weights()
    oracles.dense_reference(stock, optimizer(name, clip), loss=LOSS)
    fit(stock)
    return start, stock.get_weights()


def train(cases):
    """On every rank: the weights after training, for each case."""
    weights = []
    for name, clip in cases:
        sharded = model(ks.layers.ShardedEmbedding, partitions=True)
        strategy = ks.HybridStrategy()
        with strategy.scope():
            sharded.compile(optimizer(name, clip), loss=LOSS)
        fit(sharded)
        weights.append(sharded.get_weights())
    return strategy.size, weights


def train_without_aggregation():
    """The negative control: each rank updates from its own rows alone."""
    communicator = ks.collectives.current()
    original = type(communicator).all_to_all_along
    type(communicator).all_to_all_along = lambda self, tensor, route, name: (
        original(self, tensor, route, name) * float(self.rank == 0)
        if "push" in name
        else original(self, tensor, route, name)
    )
    try:
        return train([("sgd", None)])
    finally:
        type(communicator).all_to_all_along = original


@pytest.mark.timeout(600)  # ten models are traced: minutes on a busy machine
@pytest.mark.parametrize(
    "num_processes", [pytest.param(2, marks=pytest.mark.smoke), 4]
)
@pytest.mark.parametrize("engine", engines())
def test_training_equals_one_process(cluster, engine, num_processes):
    cases = [(name, clip) for name in OPTIMIZERS for clip in CLIPS]
    results = cluster(engine, num_processes).run(train, cases, timeout=500)
    for index, case in enumerate(cases):
        start, end = reference(*case)
        for size, weights in results:
            assert size == num_processes
            difference = oracles.relative_difference(start, end, weights[index])
            assert max(difference) < TOLERANCE, (case, difference)


@pytest.mark.parametrize("engine", engines())
def test_without_aggregation_it_does_not(cluster, engine):
    start, end = reference("sgd", None)
    for _, weights in cluster(engine, 2).run(train_without_aggregation):
        difference = oracles.relative_difference(start, end, weights[0])
        assert max(difference) > 100 * TOLERANCE
