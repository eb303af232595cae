"""Fingerprints of batches."""

import numpy as np
import pytest
import tensorflow as tf

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


@pytest.mark.parametrize("differ", [True, False])
def test_a_rank_that_has_read_less_is_compared_too(differ):
    tables = {}
    for rank, number in enumerate([1500, 300]):
        read = tf.where(tf.range(number) == 5, rank * differ, tf.range(number))
        noted = fingerprints.Fingerprints(None)
        dataset = tf.data.Dataset.from_tensor_slices(read)
        pairs = dataset.map(lambda i: (i, fingerprints.fingerprint(i)))
        for _ in noted.note(pairs):
            pass
        tables[rank] = noted.latest()
    if not differ:
        fingerprints.check_alike(tables)
        return
    with pytest.raises(ValueError, match="batch 6 .*(?s:.)*rank 1: "):
        fingerprints.check_alike(tables)
