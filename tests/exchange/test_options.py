"""Options of a step's messages."""

import types

import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.exchange import options
from keras_sparsity.exchange.options import Options


@pytest.mark.parametrize(
    ("wire_dtype", "dtype", "cast_to", "expected"),
    [
        (None, "float32", None, "float32"),
        (None, "float32", "bfloat16", "bfloat16"),
        (None, "bfloat16", "float32", "bfloat16"),
        ("bfloat16", "float32", None, "bfloat16"),
        # Of equally narrow ones the tensor's own, then the receiver's.
        ("bfloat16", "float16", None, "float16"),
        ("bfloat16", "float32", "float16", "float16"),
        ("float32", "float64", None, "float32"),
    ],
)
def test_the_narrowest_dtype_travels(wire_dtype, dtype, cast_to, expected):
    wire = Options(wire_dtype=wire_dtype).wire(dtype, cast_to)
    assert (wire.source, wire.dtype) == (tf.as_dtype(dtype), expected)


@pytest.mark.parametrize(
    ("bucket_bytes", "expected"),
    [
        (None, [[3, 2, 1, 0]]),
        (1, [[3], [2], [1], [0]]),
        (12, [[3, 2], [1], [0]]),
        (40, [[3, 2, 1], [0]]),
        (1000, [[3, 2, 1, 0]]),
    ],
)
def test_buckets_begin_with_the_last_gradient(bucket_bytes, expected):
    gradients = [tf.zeros([n]) for n in (3, 7, 2, 1)]
    found = Options(bucket_bytes=bucket_bytes).buckets(gradients)
    assert list(found.values()) == expected


def test_a_bucket_has_one_dtype():
    gradients = [tf.zeros([n], d) for n, d in ((3, "half"), (7, "float"))]
    gradients.append(tf.zeros([2], "half"))
    found = Options().buckets(gradients)
    assert found == {"float16/0": [2, 0], "float32/0": [1]}


@pytest.mark.parametrize(
    ("merges", "local_aggregation"), [(True, False), (False, True)]
)
def test_without_merging_machines_are_not_used(merges, local_aggregation):
    found = Options(merges=merges, local_aggregation=local_aggregation)
    assert not found.aggregates_locally
    assert Options().aggregates_locally


@pytest.mark.parametrize(
    ("machines", "is_possible"),
    [
        ((0, 0, 1, 1), True),
        ((0, 1, 1, 0), True),
        ((0, 0, 0, 1, 1, 1), True),
        ((0, 0, 0, 1, 1), False),
        ((0, 0), False),
        ((0, 1), False),
        ((0,), False),
    ],
)
def test_several_machines_of_as_many_processes_aggregate(machines, is_possible):
    communicator = types.SimpleNamespace(machines=machines)
    assert Options().goes_through_machines(communicator) == is_possible
    for alone in (Options(merges=False), Options(local_aggregation=False)):
        assert not alone.goes_through_machines(communicator)


@pytest.mark.parametrize(
    ("machines", "rank", "is_told"),
    [
        ((0, 0, 1), 0, True),
        ((0, 0, 1), 1, False),
        ((0, 0, 1, 1), 0, False),
        ((0, 1), 0, False),
        ((0, 0), 0, False),
    ],
)
def test_uneven_machines_are_told_of(caplog, machines, rank, is_told):
    communicator = types.SimpleNamespace(machines=machines, rank=rank)
    Options().tell_of_uneven_machines(communicator)
    assert ("`local_aggregation` has no effect" in caplog.text) == is_told
    assert ("they have 2, 1." in caplog.text) == is_told
    caplog.clear()
    Options().tell_of_uneven_machines(communicator)  # not once more
    communicator = types.SimpleNamespace(machines=machines, rank=rank)
    Options(local_aggregation=False).tell_of_uneven_machines(communicator)
    Options(merges=False).tell_of_uneven_machines(communicator)
    assert not caplog.text


def test_the_options_of_the_entered_strategy():
    assert options.entered() == Options()
    with ks.HybridStrategy(wire_dtype="float16", bucket_bytes=5).scope():
        assert options.entered().wire_dtype == "float16"
        assert options.entered().bucket_bytes == 5
    assert options.entered() == Options()
