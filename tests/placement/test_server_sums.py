"""Sums of dense gradients at servers, against NumPy."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.exchange.options import Options
from keras_sparsity.placement import server_sums
from tests.conftest import covering, engines
from tests.exchange.test_pull import measured

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


@pytest.mark.parametrize(
    ("count", "size", "server", "expected"),
    [
        (7, 3, None, [2, 2, 3]),
        (7, 3, 4, [0, 7, 0]),
        (1, 4, None, [0, 0, 0, 1]),
        # More than 2**31 is no number of 32 bits.
        (2**27 + 1, 16, None, [2**23] * 15 + [2**23 + 1]),
    ],
)
def test_parts_of_servers(count, size, server, expected):
    found = server_sums._splits(tf.constant(count), size, server)
    assert found.dtype == tf.int32
    assert found.numpy().tolist() == expected


LENGTHS = (1000, 32)  # a fourth of both is a whole number


def sum_by_machine(together, wire_dtype):
    """Dense gradients, their sums by servers, bytes that left this machine."""
    strategy = ks.HybridStrategy(
        architecture="ps", local_aggregation=together, wire_dtype=wire_dtype
    )
    ranks = strategy.collectives
    random = np.random.default_rng(strategy.rank)
    gradients = [random.normal(size=n).astype("float32") for n in LENGTHS]
    step = tf.function(
        lambda: server_sums.at_all(ranks, strategy.options, gradients)
    )
    with measured() as sent:
        sums = strategy.run(step)
    num_bytes = sum(
        n for r, n in sent.items() if r.startswith(server_sums.ROLE)
    )
    return gradients, [total.numpy() for total in sums], num_bytes


@pytest.mark.parametrize(
    ("engine", "wire_dtype"),
    covering(
        itertools.product(("native", "horovod"), (None, "bfloat16")),
        [("native", None), ("horovod", "bfloat16")],
    ),
)
def test_a_dense_sum_crosses_the_network_once_for_each_machine(
    engine, wire_dtype, cluster
):
    processes = cluster(engine, 4, 2)
    itemsize, off = (2, 0.03) if wire_dtype else (4, 1e-5)
    # Of four processes, each its part to that of the other machine, and back.
    least = 4 * 2 * sum(LENGTHS) // 4 * itemsize
    for together in (True, False):
        gradients, sums, sent = zip(
            *processes.run(sum_by_machine, together, wire_dtype), strict=True
        )
        for index in range(len(LENGTHS)):
            expected = np.sum([of_rank[index] for of_rank in gradients], axis=0)
            for of_rank in sums:
                np.testing.assert_allclose(
                    of_rank[index], expected, rtol=off, atol=off
                )
                np.testing.assert_array_equal(of_rank[index], sums[0][index])
        # Alone, also to both of the other machine, and to its own other one.
        least_sent = least if together else 3 * least
        assert (
            least_sent
            <= sum(sent)
            <= least_sent * (1 if engine == "horovod" else 1.125)
        )
