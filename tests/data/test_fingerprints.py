"""Fingerprints of batches."""

import numpy as np
import pytest

from keras_sparsity.data import fingerprints


@pytest.mark.parametrize(
    "other",
    [
        np.array([[0.0, 2.0], [1.0, 3.0]], "float32"),
        np.array([[1.0, 0.0], [2.0, 3.0]], "float32"),
        np.array([[0.0, 1.0, 2.0, 3.0]], "float32"),
        np.array([[0, 1], [2, 3]]),
        np.array([["0", "1"], ["2", "3"]]),
    ],
    ids=["values", "order", "shape", "dtype", "strings"],
)
def test_fingerprints_tell_apart(other):
    one = fingerprints.fingerprint(
        np.array([[0.0, 1.0], [2.0, 3.0]], "float32")
    )
    assert int(one) != int(fingerprints.fingerprint(other))


def test_fingerprints_of_large_batches_see_an_exchange():
    x = np.random.default_rng(0).random((64, 50_000), dtype="float32")
    one = fingerprints.fingerprint(x)
    x[[3, 4]] = x[[4, 3]]
    assert int(one) != int(fingerprints.fingerprint(x))
