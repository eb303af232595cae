"""The places of a stage's slots among those of one optimizer for all."""

import types

import keras
import numpy as np
import pytest

from keras_sparsity.pipeline.slots import places_among_all

_RULES = {
    "Adam": {},
    # It names slots after a weight's name alone, two of them alike.
    "Adafactor": {},
    # It has a variable without a name.
    "Nadam": {},
    # It chooses each weight's slots by its path.
    "Muon": {"exclude_layers": ["^out"]},
}


def _layers():
    """Lists of the weights of three layers, no two of the same sizes."""
    table = keras.layers.Embedding(5, 4, name="embedding")
    table.build()
    dense = keras.layers.Dense(6, use_bias=False, name="dense")
    dense.build((None, 7))
    out = keras.layers.Dense(8, use_bias=False, name="out")
    out.build((None, 9))
    return [each.trainable_variables for each in (table, dense, out)]


def _keys(optimizer):
    """What tells an optimizer's variables apart; not its own name."""
    found = [
        (variable.path.partition("/")[2], tuple(variable.shape))
        for variable in optimizer.variables
    ]
    assert len(set(found)) == len(found)
    return found


@pytest.mark.parametrize("name", _RULES)
def test_places_are_those_of_the_same_weights(name):
    if not hasattr(keras.optimizers, name):
        pytest.skip(f"this Keras has no {name}")
    kind, layers = getattr(keras.optimizers, name), _layers()
    every = [variable for weights in layers for variable in weights]
    whole = kind(**_RULES[name])
    whole.build(every)
    keys = _keys(whole)
    for weights in layers:
        own = kind(**_RULES[name])
        own.build(weights)
        number, places = places_among_all(
            own, types.SimpleNamespace(all_built=every, own_built=weights)
        )
        assert number == len(keys)
        assert places == [keys.index(key) for key in _keys(own)]


def test_weights_of_the_same_path():
    every = [keras.Variable(np.ones(2), name="weight") for _ in range(3)]
    rule = keras.optimizers.Adam()
    rule.build(every[1:2])
    updates = types.SimpleNamespace(all_built=every, own_built=every[1:2])
    # Its moments stand behind the number of steps, the learning rate and the
    # two moments of the first weight.
    assert places_among_all(rule, updates) == (8, [0, 1, 4, 5])
