"""Bytes that a step's updates read or write, by placement."""

import pytest

from keras_sparsity.placement.gathered import AllGather
from keras_sparsity.placement.mirrored import AllReduce
from keras_sparsity.placement.owned import Owners

# 2 processes, a table of 1,000 bytes; each process touches some of them.
SIZE, WHOLE = 2, 1_000


@pytest.mark.parametrize(
    ("reducer", "own", "num_slots", "expected"),
    [
        # An owner: its own rows, each with its slots.
        (Owners, 100, 0, 100),
        (Owners, 100, 2, 300),
        # A copy on each process: the rows of all processes.
        (AllGather, 100, 0, 200),
        (AllGather, 100, 2, 600),
        # Rows that several processes touch, once.
        (AllGather, 900, 1, 2_000),
        # And a dense gradient, which is written and read.
        (AllReduce, 100, 0, 2_200),
        (AllReduce, 100, 2, 2_600),
        (AllReduce, 900, 1, 4_000),
    ],
)
def test_bytes_of_an_update(reducer, own, num_slots, expected):
    assert reducer.updated_bytes(own, WHOLE, SIZE, num_slots) == expected
