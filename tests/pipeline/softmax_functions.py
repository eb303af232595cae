"""Functions of tests of a `SampledSoftmax` in a tail on one worker."""

import contextlib
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests.pipeline.table_functions import (
    BATCH_SIZE,
    RULES,
    fit_on,
    of_dense,
    results_on,
)

# More of them than a small table has, see `update.rules`.
NUM_CLASSES, DIM = 6011, 6
EMBEDDINGS = {
    "ordinary": keras.layers.Embedding,
    "sharded": ks.layers.ShardedEmbedding,
}


def network(embedding="ordinary"):
    """Words, and the words behind them."""
    words = keras.Input((4,), dtype="int32", name="words")
    x = EMBEDDINGS[embedding](NUM_CLASSES, 5, name="rows")(words)
    x = keras.layers.Dense(8, activation="tanh", name="head")(x)
    x = keras.layers.Dense(30, activation="tanh", name="wide")(x)
    x = keras.layers.Dense(DIM, name="hidden")(x)
    softmax = ks.layers.SampledSoftmax(
        NUM_CLASSES,
        num_sampled=20,
        seed=5,
        kernel_initializer=keras.initializers.RandomNormal(seed=3),
        name="softmax",
    )
    return keras.Model(words, softmax(x)), softmax


def data(num_examples):
    draws = np.random.default_rng(1)
    ids = draws.integers(0, NUM_CLASSES, (2, num_examples, 4))
    return ids[0], ids[1] % 50, draws.uniform(0.5, 2, (num_examples, 1))


def compiled(rule, embedding, strategy=None, is_inside=True):
    """A model, with a strategy one that is compiled in its scope."""
    keras.utils.set_random_seed(3)
    scope = strategy.scope if strategy else contextlib.nullcontext
    with scope() if is_inside else contextlib.nullcontext():
        model, softmax = network(embedding)
    optimizer = RULES[rule]()
    with scope():
        model.compile(
            optimizer if strategy else of_dense(optimizer), softmax.loss()
        )
    return model


def fit(model, num_examples, epochs=2, **options):
    return fit_on(model, data(num_examples), epochs, **options)


def results(model, num_examples):
    return results_on(model, data(num_examples))


def gone_on(model, num_examples):
    """The weights after more epochs, also with an evaluation."""
    x, y, _ = data(num_examples)
    fit(model, num_examples, validation_data=(x, y))
    return model.get_weights()


def strategy_of(**options):
    return ks.LayerPlacementStrategy(**{"stages": ["head"], **options})


def train(rule, embedding, num_examples, options, is_inside=True):
    """The results of a training, and what this rank holds."""
    num_before = _num_kernels()
    strategy = strategy_of(**options)
    model = compiled(rule, embedding, strategy, is_inside)
    softmax = model.get_layer("softmax")
    found = results(model, num_examples)
    assert not any(table.sends_messages for table in softmax.tables)
    if strategy.rank < strategy.size - 1:
        with pytest.raises(ValueError, match=rf"on rank {strategy.size - 1}"):
            tf.convert_to_tensor(softmax.kernel.value)
    found["kernels held"] = _num_kernels() - num_before
    return found


def _num_kernels():
    """The number of arrays of the kernel's shape that this process holds."""
    gc.collect()
    return sum(
        isinstance(each, tf.Variable) and each.shape == (NUM_CLASSES, DIM)
        for each in gc.get_objects()
    )


def save(rule, num_examples, folder):
    """The results of a training, and of models that have gone on from it."""
    strategy = strategy_of()
    model = compiled(rule, "sharded", strategy)
    found = results(model, num_examples)
    model.save(f"{folder}/saved.keras")
    model.save_weights(f"{folder}/saved.weights.h5")
    plain = ks.export(model)
    x, _, _ = data(num_examples)
    found["exported predicted"] = plain.predict(x, BATCH_SIZE, verbose=0)
    found["slots"] = [v.numpy() for v in plain.optimizer.variables]
    with strategy.scope():
        loaded = keras.models.load_model(f"{folder}/saved.keras")
    found["samples"] = [
        each.get_layer("softmax").sampler.state.numpy()
        for each in (model, loaded)
    ]
    other = compiled("sgd", "sharded", strategy)
    other.load_weights(f"{folder}/saved.weights.h5")
    found["loaded weights"] = other.get_weights()
    given = compiled("sgd", "sharded", strategy)
    given.set_weights(found["weights"])
    found["given predicted"] = given.predict(x, BATCH_SIZE, verbose=0)
    for name, each in {"gone on": model, "loaded gone on": loaded}.items():
        found[name] = gone_on(each, num_examples)
        with strategy.scope():  # once more, with the same optimizer
            each.compile(each.optimizer, each.loss)
        found[name] += gone_on(each, num_examples)
    return found


def checkpointed(folder, epochs, num_examples):
    """Weights after a training that goes on from a checkpoint, if any."""
    model = compiled("adam", "sharded", strategy_of())
    fit(
        model,
        num_examples,
        epochs,
        callbacks=[ks.callbacks.ShardedCheckpoint(folder)],
    )
    return model.get_weights()


def fit_by_parts(model, num_examples, num_parts):
    """Trains in one process, with a sample for each part of a batch."""
    x, y, weights = data(num_examples)
    trained = model.trainable_variables
    for begin in 2 * list(range(0, num_examples, BATCH_SIZE)):
        batch = np.arange(begin, min(begin + BATCH_SIZE, num_examples))
        with tf.GradientTape() as tape:
            loss = 0.0
            for part in np.array_split(batch, num_parts):
                of_part = model.loss(
                    y[part], model(x[part], training=True), weights[part]
                )
                loss += len(part) / len(batch) * of_part
        gradients = tape.gradient(loss, [v.value for v in trained])
        model.optimizer.apply(gradients, trained)
    return model.get_weights()


def _two_outputs():
    """A softmax, and behind it another output."""
    words = keras.Input((4,), dtype="int32", name="words")
    x = keras.layers.Embedding(20, DIM, name="rows")(words)
    x = keras.layers.Dense(DIM, name="head")(x)
    softmax = ks.layers.SampledSoftmax(20, 5, name="softmax")
    outputs = [keras.layers.Dense(1, name="score")(x), softmax(x)]
    return keras.Model(words, outputs), ["mse", softmax.loss()]


def _tied():
    words = keras.Input((4,), dtype="int32", name="words")
    rows = ks.layers.ShardedEmbedding(20, DIM, name="rows")
    x = keras.layers.Dense(DIM, name="head")(rows(words))
    x = keras.layers.Dense(DIM, name="hidden")(x)
    softmax = ks.layers.SampledSoftmax(20, 5, table=rows, name="softmax")
    return keras.Model(words, softmax(x)), softmax.loss()


def _usual():
    model, softmax = network()
    return model, softmax.loss()


def refused():
    """Messages of `compile`, by what it refuses."""
    two = {"num_tail_workers": 2}
    found = {}
    for name, strategy, make, rule in [
        ("tied", strategy_of(), _tied, "sgd"),
        ("tied, by a rule", ks.LayerPlacementStrategy(), _tied, "sgd"),
        ("head", strategy_of(stages=["softmax"]), _two_outputs, "sgd"),
        ("two", strategy_of(**two), _usual, "sgd"),
        ("columns", strategy_of(**two, tail_split="columns"), _usual, "sgd"),
        ("rule", strategy_of(), _usual, keras.optimizers.Lamb()),
        (
            "pipeline",
            ks.PipelineStrategy("1f1b", ["head", "wide"]),
            _usual,
            "sgd",
        ),
    ]:
        with pytest.raises(ValueError) as raised, strategy.scope():
            model, loss = make()
            model.compile(rule, loss)
        found[name] = str(raised.value)
    return found


def planned(num_examples):
    """The plan of a model that is divided."""
    x, y, _ = data(num_examples)
    model = compiled("sgd", "sharded", strategy_of())
    return ks.plan(model, tf.data.Dataset.from_tensors((x, y)))
