"""The places of a stage's slots among those of one optimizer for all."""

import types

import keras
import numpy as np
import pytest

from keras_sparsity.pipeline.slots import places_among_all

_RULES = {
    "Adam": {},
    "Adafactor": {},
    # It chooses each weight's slots by its path.
    "Muon": {"exclude_layers": ["^out", "kernel_of_mine$"]},
}


def _layers():
    """Lists of the weights of three layers."""
    table = keras.layers.Embedding(5, 4, name="embedding")
    dense, out = (keras.layers.Dense(4, name=name) for name in ("dense", "out"))
    table.build()
    for layer in (dense, out):
        layer.build((None, 4))
    return [each.trainable_variables for each in (table, dense, out)]


@pytest.mark.parametrize("name", _RULES)
def test_places_are_those_of_the_same_weights(name):
    if not hasattr(keras.optimizers, name):
        pytest.skip(f"this Keras has no {name}")
    kind = getattr(keras.optimizers, name)
    layers = _layers()
    layers[1].append(keras.Variable(np.ones((4, 4)), name="kernel_of_mine"))
    every = [variable for weights in layers for variable in weights]
    whole = kind(**_RULES[name])
    whole.build(every)
    paths = [variable.path for variable in whole.variables]
    assert len(set(paths)) == len(paths)
    for weights in layers:
        own = kind(**_RULES[name])
        own.build(weights)
        number, places = places_among_all(
            own, types.SimpleNamespace(all_built=every, own_built=weights)
        )
        assert number == len(paths)
        assert places == [paths.index(v.path) for v in own.variables]


def test_weights_of_the_same_path():
    every = [keras.Variable(np.ones(2), name="weight") for _ in range(3)]
    rule = keras.optimizers.Adam()
    rule.build(every[1:2])
    updates = types.SimpleNamespace(all_built=every, own_built=every[1:2])
    # Its moments stand behind the number of steps, the learning rate and the
    # two moments of the first weight.
    assert places_among_all(rule, updates) == (8, [0, 1, 4, 5])
