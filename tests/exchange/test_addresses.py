"""Numbers and addresses of rows, against layouts followed by hand."""

import types

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.exchange.addresses import Addresses, narrowest
from keras_sparsity.exchange.layout import Layout

MOST = 2**31 - 1  # of int32


@pytest.mark.parametrize(
    ("num_rows", "dtype"),
    [
        (1, tf.uint16),
        (2**16 - 2, tf.uint16),
        (2**16 - 1, tf.int32),  # the largest value is no row's
        (MOST - 1, tf.int32),
        (MOST, tf.int64),
    ],
)
def test_the_narrowest_dtype(num_rows, dtype):
    assert narrowest(num_rows) == dtype


def addresses_of(*layouts, rank=0):
    ranks = types.SimpleNamespace(rank=rank, size=3)
    return Addresses(
        [
            types.SimpleNamespace(
                collectives=ranks, layout=layout, num_rows=layout.num_rows
            )
            for layout in layouts
        ]
    )


@pytest.mark.parametrize(
    ("num_rows", "dtype"),
    [((9, MOST - 10), tf.int32), ((9, MOST - 9), tf.int64), ((9,), tf.int32)],
)
def test_the_dtype_of_numbers_of_all_tables(num_rows, dtype):
    layouts = [Layout(rows, 3) for rows in num_rows]
    assert addresses_of(*layouts).row_dtype == dtype


def test_each_row_has_an_address_of_its_own_at_its_owner():
    layouts = Layout(7, 3, (0, 1)), Layout(2, 4, (2, 0)), Layout(5, 1, (1,))
    of_ranks = [addresses_of(*layouts, rank=rank) for rank in range(3)]
    expected = {rank: [] for rank in range(3)}  # numbers by address
    for rank, addresses in enumerate(of_ranks):
        pieces = []
        for table, layout in enumerate(layouts):
            owned = layout.owned_partitions(rank)
            assert addresses.first_addresses[rank, table] == len(expected[rank])
            for slot, partition in enumerate(owned):
                first = addresses.first_rows[table]
                rows = layout.rows_of(partition)
                if len(rows):
                    start = len(expected[rank])
                    pieces.append((table, slot, partition, start))
                expected[rank] += [first + row for row in rows]
        assert addresses.pieces == pieces
        assert addresses.largest == max(
            sum(layout.num_stored_rows(r) for layout in layouts)
            for r in range(3)
        )
    numbers = tf.range(14, dtype=of_ranks[0].row_dtype)
    owner, address = (part.numpy() for part in of_ranks[0].locate(numbers))
    found = [
        expected[rank][place]
        for rank, place in zip(owner, address, strict=True)
    ]
    np.testing.assert_array_equal(found, np.arange(14))
