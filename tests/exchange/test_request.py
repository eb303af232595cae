"""A rank's request: rows of several tables, each once."""

import types

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.exchange.options import Options
from keras_sparsity.exchange.request import Request

WORDS, USERS = (types.SimpleNamespace(num_rows=n) for n in (5, 3))


def request_of(*requests, merges=True):
    exchange = types.SimpleNamespace(
        groups=((WORDS,), (USERS,)),
        options=Options(merges=merges),
        addresses=types.SimpleNamespace(first_rows=[0, 5], row_dtype=tf.int32),
    )
    return Request(
        exchange,
        [([table], tf.constant(ids, dtype)) for table, ids, dtype in requests],
    )


IDS = (
    (WORDS, [4, 1, 4], "int32"),
    (USERS, [0, 2], "int64"),
    (WORDS, [1], "uint8"),
    (USERS, [], "int32"),
)


@pytest.mark.parametrize("merges", [True, False])
def test_each_row_once_where_duplicates_merge(merges):
    request = request_of(*IDS, merges=merges)
    request.merge()
    numbers = np.array([4, 1, 4, 5, 7, 1])
    np.testing.assert_array_equal(request.numbers, numbers)
    np.testing.assert_array_equal(
        tf.gather(request.rows, request.index), numbers
    )
    assert len(request.rows) == (4 if merges else 6)
    parts = request.split(request.numbers)
    assert [part.numpy().tolist() for part in parts] == [
        [4, 1, 4],
        [5, 7],
        [1],
        [],
    ]


def test_the_ids_of_each_group():
    request = request_of(*IDS)
    request.merge()
    assert sorted(request.ids_of(0).numpy()) == [1, 4]
    assert sorted(request.ids_of(1).numpy()) == [0, 2]


@pytest.mark.parametrize("wrong", [-1, 3, 2**40, -(2**40)])
def test_an_id_outside_is_found_with_its_table(wrong):
    request = request_of(
        *IDS, (USERS, [1, wrong], "int64"), (WORDS, [2], "int8")
    )
    assert [bool(each) for each in request.are_inside()] == [True] * 4 + [
        False,
        True,
    ]
    assert request.outside().numpy().tolist() == [1, wrong]
