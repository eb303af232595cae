"""What `compile` cuts in stages, and what it refuses."""

from contextlib import nullcontext

import numpy as np
import pytest

import keras_sparsity as ks
from tests import pipeline_functions


def refusals():
    """Messages about an optimizer that has trained the whole model, and more.

    Such as what needs all processes, of which those of one stage call it.
    """
    model = pipeline_functions.made("dense")
    model.compile("adam", "mse")
    x, y = pipeline_functions.data("dense", 8)
    model.fit(x, y, verbose=0)
    with ks.PipelineStrategy("1f1b", ["dense_1"]).scope():
        with pytest.raises(ValueError) as raised:
            model.compile(model.optimizer, "mse")
    messages = [str(raised.value)]
    model = pipeline_functions.made("dense")
    with ks.PipelineStrategy("1f1b", ["dense_1"]).scope():
        for refused in (
            lambda: model.compile("sgd", ks.losses.GlobalMean("mse")),
            lambda: ks.gather_batch(np.ones((1, 6))),
        ):
            with pytest.raises(ValueError) as raised:
                refused()
            messages.append(str(raised.value))
    return messages


def test_models_that_stages_cannot_train_are_refused(cluster):
    for of_optimizer, of_loss, of_layer in cluster("native", 2).run(refusals):
        assert "Received: an Adam that is built" in of_optimizer
        assert "Give `compile` a new one" in of_optimizer
        assert "Give `compile` the loss that it wraps" in of_loss
        assert "Train under `ks.HybridStrategy`" in of_layer


def twice_in_scope():
    """Losses of a model that is compiled where the scope is entered twice."""
    x, y = pipeline_functions.data("dense", 8)
    found = []
    for is_nested in (False, True):
        model = pipeline_functions.made("dense")
        strategy = ks.PipelineStrategy("1f1b", ["dense_1"])
        with strategy.scope():
            within = strategy.scope() if is_nested else nullcontext()
            with within:
                model.compile("adam", "mse")
        fitted = model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        found.append(fitted.history["loss"])
    return found


def test_a_scope_within_the_scope_cuts_a_model_once(cluster):
    for once, nested in cluster("native", 2).run(twice_in_scope):
        assert nested == once
