"""Metrics of a checkpoint, on another number of processes."""

import types

import keras
import numpy as np
import pytest

from keras_sparsity.checkpoint import storage

SAVED = [np.float32(1.0), np.float32(5.0)]  # by two processes


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("aggregation", "read", "expected"),
    [("sum", np.sum, 6.0), ("mean", np.mean, 3.0)],
)
def test_what_is_read_stays(aggregation, read, expected, size):
    """A metric's variable is summed or averaged over the ranks when read."""
    variables = [
        keras.Variable(7.0, aggregation=aggregation) for _ in range(size)
    ]
    for rank, variable in enumerate(variables):
        storage._restore_own(
            types.SimpleNamespace(
                variable=variable, section="metrics", name="metric"
            ),
            SAVED,
            types.SimpleNamespace(rank=rank, size=size),
        )
    assert read([v.numpy() for v in variables]) == expected
