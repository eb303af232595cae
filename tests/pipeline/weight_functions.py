"""Functions that the processes of tests of stages' weights run."""

import contextlib
import weakref
from unittest import mock

import keras
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests import pipeline_functions

# Optimizers that count more than the steps of what they update.
RULES = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    # The momentums of all steps count.
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    # Frozen weights are averaged, too.
    "averages": lambda: keras.optimizers.Nadam(
        0.01, use_ema=True, ema_momentum=0.8
    ),
    # And overwritten by their averages.
    "overwritten": lambda: keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=5
    ),
}


def _fit(network):
    x, y = pipeline_functions.data("dense", 22)
    network.fit(
        *(x, y, pipeline_functions.BATCH_SIZE),
        **{"epochs": 2, "shuffle": False, "verbose": 0},
    )


def frozen(names, rule, scope=contextlib.nullcontext):
    """A model of which some layers are frozen in the second of trainings.

    No call uses its layer `unused`.

    Args:
        names: of these layers.
        rule: of `RULES`.
        scope: that of a strategy; by default of none.
    """
    network = _with_unused()
    rule = RULES[rule]()
    layers = {each.name: each for each in [*network.layers, network.unused]}
    x, y = pipeline_functions.data("dense", 22)
    for are_trained in (True, False):
        for name in names:
            layers[name].trainable = are_trained
        with scope():
            network.compile(rule, "mse")
        # At the end of `fit` Keras would make averages the weights; while some
        # are frozen, those of others.
        for _ in range(3):
            network.train_on_batch(x, y)
    for name in names:
        layers[name].trainable = True
    with scope():
        network.compile(rule, "mse")
    _fit(network)
    return network


def _with_unused():
    network = pipeline_functions.made("dense")
    network.unused = keras.layers.Dense(3, name="unused")
    network.unused.build((None, 2))
    return network


def state_of(network):
    """Arrays of the weights, and of the optimizer's variables."""
    slots = [variable.numpy() for variable in network.optimizer.variables]
    return network.get_weights(), slots


def freeze(names, rule, folder):
    """The state of the whole model, and the weights of its file."""
    strategy = ks.PipelineStrategy("1f1b", ["dense_1"], 2)
    network = frozen(names, rule, strategy.scope)
    network.save(f"{folder}/frozen.keras")
    loaded = _with_unused()
    loaded.load_weights(f"{folder}/frozen.keras")
    return state_of(ks.export(network)), loaded.get_weights()


def held_while_saving(folder):
    """Bytes of others' values that a rank holds at most, and of all of them."""
    network = pipeline_functions.made("dense")
    with ks.PipelineStrategy("1f1b", ["dense_1"], 2).scope():
        network.compile("adam", "mse")
    communicator = network.distribute_strategy.collectives
    stock, seen, most = communicator.broadcast, [], 0

    def broadcast(*args, **kwargs):
        nonlocal most
        found = stock(*args, **kwargs)
        seen.extend((weakref.ref(each), _num_bytes(each)) for each in found)
        most = max(most, sum(size for ref, size in seen if ref() is not None))
        return found

    with mock.patch.object(communicator, "broadcast", broadcast):
        network.save(f"{folder}/held.keras")
    return most, sum(size for _, size in seen)


def _num_bytes(tensor):
    return int(tf.size(tensor)) * tensor.dtype.size


def thaw():
    """The message where a layer is trained that was frozen at first."""
    network = pipeline_functions.made("dense")
    network.get_layer("out").trainable = False
    rule = keras.optimizers.Adam(0.01)
    with ks.PipelineStrategy("1f1b", ["dense_1"]).scope():
        network.compile(rule, "mse")
        network.get_layer("out").trainable = True
        with pytest.raises(ValueError) as raised:
            network.compile(rule, "mse")
        network.compile("adam", "mse")
    _fit(network)
    return str(raised.value)


def normalized(folder):
    """Weights and predictions of a model, and of those that load its file.

    Its first layer makes constants of its weights.
    """
    x, _ = pipeline_functions.data("dense", 8)
    strategy = ks.PipelineStrategy("1f1b", ["first"], 2)
    models = []
    for is_adapted in (True, False):
        layers = [
            keras.Input((6,)),
            keras.layers.Normalization(),
            keras.layers.Dense(4, name="first"),
            keras.layers.Dense(2, name="second"),
        ]
        if is_adapted:
            layers[1].adapt(3 * x + 5)
        model = keras.Sequential(layers)
        with strategy.scope():
            model.compile("sgd", "mse")
        models.append(model)
    models[0].save(f"{folder}/normalized.keras")
    models[1].load_weights(f"{folder}/normalized.keras")
    with strategy.scope():
        models.append(keras.models.load_model(f"{folder}/normalized.keras"))
    for model in models[1:]:
        with strategy.scope():
            model.compile("sgd", "mse")
        model.load_weights(f"{folder}/normalized.keras")
    return [
        (model.get_weights(), model.predict(x, verbose=0))
        for model in [*models, *map(ks.export, models)]
    ]
