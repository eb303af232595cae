"""Dtypes that an engine lacks travel as others."""

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.collectives.wire import wires

WIRES = wires(
    ["float32"], casts={"bool": "int32"}, bitcasts={"uint32": "int32"}
)


@pytest.mark.parametrize(
    ("dtype", "values", "travelling"),
    [
        ("float32", [0.5, -1.0], "float32"),
        ("bool", [True, False], "int32"),
        ("uint32", [0, 2**32 - 1], "int32"),
    ],
)
def test_values_come_back(dtype, values, travelling):
    sent = []

    def send(tensor, offset, scale):
        sent.append((tensor.dtype.name, offset, scale))
        return tensor

    tensor = tf.constant(values, dtype)
    received = WIRES(tensor.dtype).carry(tensor, send, 1, scale=2)
    assert sent == [(travelling, 1, 2)]
    assert received.dtype == tensor.dtype
    np.testing.assert_array_equal(received, values)
