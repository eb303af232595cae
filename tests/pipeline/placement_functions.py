"""Functions that the processes of tests of layer placement run."""

import contextlib
import io
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.pipeline.links import Link

BATCH_SIZE = 8


def convolutional():
    """Statistics in the head, of all workers, and in the tail.

    Adam would make steps of the noise of a bias in front of them.
    """
    x = inputs = keras.Input((8, 8, 2))
    x = keras.layers.Conv2D(4, 3, use_bias=False, name="conv")(x)
    x = keras.layers.BatchNormalization(synchronized=True, name="head")(x)
    x = keras.layers.ReLU(name="relu")(x)
    x = keras.layers.MaxPooling2D(name="pool")(x)
    x = keras.layers.Flatten(name="flat")(x)
    x = keras.layers.Dense(
        32, use_bias=False, kernel_regularizer="l2", name="wide"
    )(x)
    x = keras.layers.BatchNormalization(synchronized=True, name="tail")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="out")(x))


def ids():
    """Rows in the head, with a mask; a loss of its layers."""
    x = inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(
        30, 8, mask_zero=True, embeddings_regularizer="l2", name="rows"
    )(x)
    x = keras.layers.LSTM(6, name="states")(x)
    x = keras.layers.Dense(16, kernel_regularizer="l2", name="wide")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="out")(x))


MODELS = {"convolutional": convolutional, "ids": ids}
STAGES = {"convolutional": None, "ids": ["rows"]}


def data(name, num_examples):
    draws = np.random.default_rng(1)
    if name == "ids":
        x = draws.integers(0, 30, (num_examples, 5))
    else:
        x = draws.normal(size=(num_examples, 8, 8, 2)).astype("float32")
    return (
        x,
        draws.integers(0, 3, num_examples),
        draws.uniform(0.5, 2, num_examples),
    )


def compiled(name, strategy=None):
    """A model, with a strategy one that is made inside of its scope."""
    keras.utils.set_random_seed(3)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = MODELS[name]()
        model.compile(**_options())
    return model


def _options():
    return {
        # With the usual epsilon, the smallest gradients' noise makes steps.
        "optimizer": keras.optimizers.Adam(
            0.01, epsilon=1e-3, global_clipnorm=0.5
        ),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "weighted_metrics": ["accuracy"],
    }


def results(model, name, num_examples):
    """Weights, losses and predictions of a training."""
    x, y, weights = data(name, num_examples)
    history = model.fit(
        x,
        y,
        BATCH_SIZE,
        epochs=2,
        sample_weight=weights,
        shuffle=False,
        verbose=0,
    ).history
    return {
        "weights": model.get_weights(),
        "history": history,
        "evaluated": model.evaluate(
            x, y, BATCH_SIZE, sample_weight=weights, verbose=0
        ),
        "predicted": model.predict(x, BATCH_SIZE, verbose=0),
    }


def train(name, num_examples, folder, options):
    """The results, and those of a model that is saved and loaded half-way."""
    strategy = ks.LayerPlacementStrategy(
        STAGES[name], threshold=-0.2, **options
    )
    model = compiled(name, strategy)
    found = results(model, name, num_examples)
    part = model._keras_sparsity_pipeline.parts[0]
    if strategy.size == 1:
        return found
    is_tail = strategy.stages_of_ranks[strategy.rank] == 1
    own = sum(v.value.shape.num_elements() or 0 for v in _held(model))
    model.save(f"{folder}/placed.keras")
    with strategy.scope():
        loaded = keras.models.load_model(f"{folder}/placed.keras")
    for each in (model, loaded):
        x, y, _ = data(name, num_examples)
        each.fit(x, y, BATCH_SIZE, shuffle=False, verbose=0)
    return {
        **found,
        "head": part.names,
        "is_tail": is_tail,
        "num_held": own,
        "gone_on": model.get_weights(),
        "resumed": loaded.get_weights(),
    }


def _held(model):
    """The weights whose values this rank has."""
    weights = model._keras_sparsity_pipeline
    strategy = model.distribute_strategy
    number = strategy.stages_of_ranks[strategy.rank]
    return weights.parts[number].model.weights


def left(options):
    """The results of a model that gains nothing, and what was printed."""
    strategy = ks.LayerPlacementStrategy(**options)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model = compiled("ids", strategy)
        with strategy.scope():
            # As within the scope, so once more.
            model.compile(**_options())
            found = results(model, "ids", 22)
        x, y, _ = data("ids", 22)
        plan = ks.plan(model, tf.data.Dataset.from_tensors((x, y)))
    name = type(model.distribute_strategy).__name__
    return found, printed.getvalue(), name, plan


def planned(log_dir):
    """The plan of the convolutional model, and of where a rule divides it."""
    strategy = ks.LayerPlacementStrategy(threshold=-0.2)
    model = compiled("convolutional", strategy)
    before = model.get_weights()
    x, y, _ = data("convolutional", 12)
    plan = ks.plan(model, tf.data.Dataset.from_tensors((x, y)))
    if strategy.rank == 0:
        plan.write(log_dir)
    is_same = all(map(np.array_equal, before, model.get_weights()))
    return plan, is_same


def shared(folder):
    """A head's weights and random state, of weights that differ by rank.

    Then those after a training, of the model and of one that was saved before
    it; empty at the tail.
    """
    strategy = ks.LayerPlacementStrategy(["drop"])
    keras.utils.set_random_seed(strategy.rank)
    kernel = keras.initializers.GlorotUniform()
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, kernel_initializer=kernel, name="head"),
            keras.layers.Dropout(0.5, name="drop"),
            keras.layers.Dense(1),
        ]
    )
    with strategy.scope():
        model.compile("sgd", "mse")
    is_head = strategy.rank < strategy.size - 1
    found = _head(model) if is_head else []
    path = f"{folder}/dropped.keras"
    ones = np.ones((8, 4)), np.ones((8, 1))
    model.fit(*ones, 4, verbose=0)
    model.save(path)
    with strategy.scope():
        loaded = keras.models.load_model(path)
    for each in (model, loaded):
        each.fit(*ones, 4, verbose=0)
        found += _head(each) if is_head else []
    return found


def _head(model):
    head, drop, _ = model.layers
    return [head.kernel.numpy(), drop.seed_generator.state.numpy()]


def divided_by_times(seconds_per_byte):
    """The head's layers by predicted steps; None if it is not divided.

    Args:
        seconds_per_byte: as if the links had been measured so.
    """
    strategy = ks.LayerPlacementStrategy(rule="fastest", num_examples=4)
    with mock.patch.object(
        Link, "seconds_per_byte", lambda link: seconds_per_byte
    ):
        model = compiled("convolutional", strategy)
    adoption = getattr(model, "_keras_sparsity_pipeline", None)
    return adoption and adoption.parts[0].names


def too_many_tails():
    """The message where two of three processes would train the tail."""
    with pytest.raises(ValueError) as raised:
        ks.LayerPlacementStrategy(num_tail_workers=2)
    return str(raised.value)
