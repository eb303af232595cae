"""Rows by partition and owner, against a table that is filled by hand."""

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.exchange.layout import Layout, common_rows, row_of

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
