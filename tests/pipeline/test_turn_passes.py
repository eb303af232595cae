"""The values that passes that are computed again begin with."""

import inspect

import keras
import pytest

from keras_sparsity.pipeline import turn_passes

_HAS_RENORM = (
    "renorm" in inspect.signature(keras.layers.BatchNormalization).parameters
)


@pytest.mark.parametrize("renorm", [False] + [True] * _HAS_RENORM)
def test_statistics_that_a_pass_does_not_read(renorm):
    """Moving ones; but a pass with `renorm` corrects by them."""
    options = {"renorm": True} if renorm else {}
    norm = keras.layers.BatchNormalization(name="norm", **options)
    watched = keras.layers.Dense(2)
    watched.seen = keras.metrics.Mean(name="seen")
    model = keras.Sequential([keras.Input((2,)), norm, watched])
    expected = [*watched.seen.variables]
    if not renorm:
        expected += norm.non_trainable_variables
    assert turn_passes._unread(model) == set(map(id, expected))
