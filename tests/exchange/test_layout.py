"""Rows by partition, owner and address, against tables filled by hand."""

import types

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.exchange.layout import (
    Addresses,
    Layout,
    common_rows,
    narrowest,
    row_of,
)

MOST = 2**31 - 1  # of int32
# Rows, partitions, owners.
LAYOUTS = [
    (1, 1, (0,)),
    (7, 3, (0, 1)),
    (5, 8, (1, 0)),
    (61, 5, (0, 2, 1, 3)),
    (24, 4, (0, 1, 2, 3, 4)),
    (13, 3, (4, 2)),  # servers
]


@pytest.mark.parametrize(("num_rows", "count", "owners"), LAYOUTS)
def test_each_row_is_stored_once_and_found_there(num_rows, count, owners):
    layout = Layout(num_rows, count, owners)
    ids = tf.range(num_rows)
    owner = layout.owner(ids).numpy()
    index = layout.owned_index(ids).numpy()
    local, position = layout.local_row(ids), layout.stored_position(ids)
    found = []
    ranks = range(max(owners) + 1)
    for rank in ranks:
        for place, partition in enumerate(layout.owned_partitions(rank)):
            count_of = layout.num_rows_of(partition)
            assert count_of == len(layout.rows_of(partition))
            for local_row, row in enumerate(layout.rows_of(partition)):
                assert (owner[row], index[row]) == (rank, place)
                assert local[row] == local_row
                assert row_of(partition, local_row, count) == row
                assert position[row] == len(found)
                found.append(row)
    assert sorted(found) == list(range(num_rows))
    by_rank = [layout.owned_rows(rank) for rank in ranks]
    np.testing.assert_array_equal(np.concatenate(by_rank), found)
    stored = [layout.num_stored_rows(rank) for rank in ranks]
    assert [len(rows) for rows in by_rank] == stored


@pytest.mark.parametrize("first", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("second", [1, 2, 4, 7, 16])
def test_common_rows_are_those_of_both(first, second):
    for one in range(first):
        for other in range(second):
            common = common_rows((one, first), (other, second), 13)
            both = set(range(one, 13, first)) & set(range(other, 13, second))
            assert list(common) == sorted(both)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 0), "num_partitions=0"),
        ((4, 1, (1, 1)), r"owners=\(1, 1\)"),
        ((4, 1, ()), r"owners=\(\)"),
        ((4, 1, (-1,)), r"owners=\(-1,\)"),
    ],
)
def test_a_layout_of_no_partition_or_with_wrong_owners(arguments, message):
    with pytest.raises(ValueError, match=message):
        Layout(*arguments)


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
