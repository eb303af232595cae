"""What `compile` cuts in stages, and what it refuses."""

import keras
import pytest

import keras_sparsity as ks


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: ks.PipelineStrategy("1f1b"),
        lambda: ks.PipelineStrategy("vanilla"),
        lambda: ks.LayerPlacementStrategy(),
    ],
)
def test_sparse_inputs_are_refused(strategy):
    inputs = keras.Input((6,), name="words", sparse=True)
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    with strategy().scope():
        with pytest.raises(ValueError, match=r"sparse.*'words'.*to_dense"):
            model.compile("sgd", "mse")
