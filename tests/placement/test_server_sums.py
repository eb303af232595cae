"""Sums of dense gradients at servers, against NumPy."""

import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.exchange.options import Options
from keras_sparsity.placement import server_sums
from tests.conftest import engines

# More gradients than processes, some with fewer elements than processes.
SHAPES = [(3, 5), (), (7,), (2, 2, 2), (1,), (64,), (11, 3)]


def gradients(rank):
    random = np.random.default_rng(rank)
    return [random.normal(size=shape).astype("float32") for shape in SHAPES]


def summed(function, wire_dtype):
    communicator = ks.collectives.current()
    values = [tf.constant(value) for value in gradients(communicator.rank)]
    sums = tf.function(getattr(server_sums, function))(
        communicator, Options(wire_dtype=wire_dtype), values
    )
    return [value.numpy() for value in sums]


@pytest.mark.parametrize(
    ("wire_dtype", "tolerance"), [(None, 1e-6), ("bfloat16", 2e-2)]
)
@pytest.mark.parametrize("function", ["at_all", "in_turn"])
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_sums(cluster, engine, function, wire_dtype, tolerance):
    expected = [
        np.sum(of_ranks, axis=0)
        for of_ranks in zip(*map(gradients, range(2)), strict=True)
    ]
    for found in cluster(engine, 2).run(summed, function, wire_dtype):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(
                one, other, rtol=tolerance, atol=tolerance
            )
