"""Rows that come ahead of their step: the same to the bit, and really early."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.collectives import journal
from tests.conftest import engines

NUM_ROWS, DIM, BATCH = 80, 4, 8


class Elsewhere(keras.layers.Layer):
    """Trains rows of a table that another layer is asked for."""

    def __init__(self, layer):
        super().__init__()
        object.__setattr__(self, "other", layer)  # not a part of this one

    def call(self, inputs):
        return inputs + tf.reduce_sum(self.other.table.gather(tf.range(30)))


class BetweenSteps(keras.callbacks.Callback):
    """Calls a function of the model after some steps."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_batch_end(self, batch, logs=None):
        if batch in (1, 3):
            self.function(self.model)


def assign_rows(model):
    table = model.get_layer("words_table").table
    table.assign(table.read() + 1)


def repartition(model):
    table = model.get_layer("words_table").table
    ks.moves.move(model, {table: ("ps", 5)})


def several(elsewhere=False):
    """Several tables, of which one's rows never change."""
    words = keras.Input((3,), dtype="int32")
    users = keras.Input((1,), dtype="int32")
    make = ks.layers.ShardedEmbedding
    table = make(NUM_ROWS, DIM, name="words_table")
    frozen = make(NUM_ROWS, DIM, trainable=False, name="frozen")
    of_users = make(40, DIM, num_partitions=3, name="of_users")
    rows = [table(words), of_users(users), frozen(users)]
    hidden = keras.layers.Flatten()(keras.layers.Concatenate(axis=1)(rows))
    hidden = keras.layers.Dense(3)(hidden)
    if elsewhere:
        hidden = Elsewhere(table)(hidden)
    model = keras.Model([words, users], keras.layers.Dense(1)(hidden))
    return model, lambda words, users: (words, users)


def one():
    """One table of a sequential model that knows its input late."""
    layer = ks.layers.ShardedEmbedding(NUM_ROWS, DIM, name="words_table")
    layers = [layer, keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential(layers), lambda words, users: words


SGD, ADAGRAD, ADAM = (
    ("SGD", {"learning_rate": 0.1}),
    ("Adagrad", {"learning_rate": 0.1}),
    ("Adam", {"learning_rate": 0.01}),
)
# What is trained, how, and whether rows come early.
CASES = {
    "sgd": dict(rule=SGD),
    "adagrad": dict(rule=ADAGRAD, epochs=3, shuffle=True),
    "lazy": dict(rule=ADAM, sparse_updates="lazy"),
    "exact": dict(rule=ADAM, is_early=False),
    "one": dict(make=one, steps_per_execution=4, num_examples=5 * BATCH + 1),
    "narrow": dict(wire_dtype="bfloat16", steps_per_execution=2, repeat=2),
    "assigned": dict(callback=assign_rows),
    "moved": dict(callback=repartition, epochs=2),
    "elsewhere": dict(elsewhere=True),
    "eager": dict(run_eagerly=True),
}


def train(prefetch, case):
    """Losses, all state and the calls of each role, of one case."""
    case = dict(CASES[case])
    strategy = ks.HybridStrategy(
        architecture="hybrid",
        prefetch=prefetch,
        wire_dtype=case.get("wire_dtype"),
        sparse_updates=case.get("sparse_updates", "exact"),
    )
    keras.utils.set_random_seed(3)
    if "elsewhere" in case:
        model, inputs = several(elsewhere=True)
    else:
        model, inputs = case.get("make", several)()
    rule, options = case.get("rule", ADAGRAD)
    with strategy.scope():
        model.compile(
            keras.optimizers.get({"class_name": rule, "config": options}),
            "mse",
            steps_per_execution=case.get("steps_per_execution", 1),
            run_eagerly=case.get("run_eagerly", False),
        )
    random = np.random.default_rng(0)
    count = case.get("num_examples", 6 * BATCH)
    words = random.integers(NUM_ROWS, size=(count, 3))
    users = random.integers(40, size=(count, 1))
    y = words.mean(axis=1, keepdims=True) / NUM_ROWS
    data = tf.data.Dataset.from_tensor_slices((inputs(words, users), y))
    data = data.batch(BATCH).repeat(case.get("repeat", 1))
    if case.get("shuffle"):
        data = data.shuffle(4, seed=1)
    callbacks = [BetweenSteps(case["callback"])] if "callback" in case else []
    journal.current().measures = True
    history = model.fit(
        data,
        epochs=case.get("epochs", 1),
        validation_data=data,
        callbacks=callbacks,
        verbose=0,
    ).history
    calls = collections.Counter()
    for (role, *_), totals in journal.current().totals().items():
        calls[role] += totals.calls
    journal.current().measures = False
    state = [np.array(w) for w in model.get_weights()]
    return history, state, model.optimizer.state(), calls


def train_all(names):
    return {
        name: [train(prefetch, name) for prefetch in (False, True)]
        for name in names
    }


@pytest.mark.parametrize("engine", engines())
def test_the_same_to_the_bit(engine, cluster):
    for rank_result in cluster(engine, 2).run(train_all, list(CASES)):
        for name, (expected, found) in rank_result.items():
            assert found[0] == expected[0], name
            for a, b in zip(expected[1], found[1], strict=True):
                np.testing.assert_array_equal(a, b, name)
            for a, b in zip(expected[2], found[2], strict=True):
                np.testing.assert_array_equal(a, b, name)
            assert not any("/next/" in role for role in expected[3]), name
            print(name, found[3])
