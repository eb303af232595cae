"""What `compile` cuts in stages, and what it refuses."""

import keras
import pytest

import keras_sparsity as ks
from tests import pipeline_functions


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


def refused_optimizer():
    """The message about an optimizer that has trained the whole model."""
    model = pipeline_functions.made("dense")
    model.compile("adam", "mse")
    x, y = pipeline_functions.data("dense", 8)
    model.fit(x, y, verbose=0)
    with ks.PipelineStrategy("1f1b", ["dense_1"]).scope():
        with pytest.raises(ValueError) as raised:
            model.compile(model.optimizer, "mse")
    return str(raised.value)


def test_optimizers_with_slots_of_the_whole_model_are_refused(cluster):
    for message in cluster("native", 2).run(refused_optimizer):
        assert "Received: an Adam that is built" in message
        assert "Give `compile` a new one" in message
