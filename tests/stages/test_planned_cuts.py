"""A planned model is cut at the same places once it is made anew."""

import keras
import pytest

import keras_sparsity as ks
from keras_sparsity.pipeline import cuts
from keras_sparsity.stages.cutting import Cutter
from keras_sparsity.stages.planned_cuts import PlannedCuts

# Keras's own, of nested models.
pytestmark = pytest.mark.filterwarnings("ignore:.*does not support masking")


def _cutter(last=None):
    """Of a nested model without names, that calls a layer twice."""
    twice = keras.layers.ReLU()
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), twice])
    x = inputs = keras.Input((4,))
    x = keras.ops.square(twice(keras.layers.Dense(4)(x)))
    x = keras.layers.Dense(4, name="part_7")(inner(x))
    return Cutter(keras.Model(inputs, (last or keras.layers.Dense(4))(x)))


def _planned():
    return PlannedCuts(tuple(call.name for call in _cutter().calls), (1, 4))


def test_places_stay_whatever_keras_names_the_layers():
    planned, anew = _planned(), _cutter()
    names = [call.name for call in anew.calls]
    assert names[0] != planned.names[0] and names[3] != planned.names[3]
    strategy = ks.PipelineStrategy("gpipe")
    strategy.planned_cuts = planned
    assert cuts.places(anew, strategy, None) == [1, 4]


def test_another_model_is_refused():
    with pytest.raises(ValueError, match="was planned.*Received.*layer_norm"):
        _planned().places_in(_cutter(last=keras.layers.LayerNormalization()))
