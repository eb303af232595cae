"""A batch of arrays is divided as one of tensors."""

import contextlib

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests import pipeline_functions


@pytest.mark.parametrize("schedule", ["1f1b", "vanilla"])
@pytest.mark.parametrize(
    "weighted", [{"sample_weight": np.arange(8.0)}, {"class_weight": {0: 3.0}}]
)
def test_eager_batches_of_arrays(schedule, weighted):
    """Of one batch: Keras hands arrays on to a step that is not traced."""
    strategy = ks.PipelineStrategy(schedule, num_micro_batches=2)
    x, _ = pipeline_functions.data("plain line", 8)
    labels = np.arange(8) % 2
    of_test = weighted if "sample_weight" in weighted else {}
    found = []
    for scope in (strategy.scope, contextlib.nullcontext):
        model = pipeline_functions.made("dense")
        with scope():
            model.compile(
                keras.optimizers.SGD(0.1, momentum=0.9),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                run_eagerly=True,
            )
        for _ in range(2):
            model.train_on_batch(x, labels, **weighted)
        loss = model.test_on_batch(x, labels, **of_test)
        found.append([*model.get_weights(), loss])
    for value, expected in zip(*found, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)
