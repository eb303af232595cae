"""The state of a stock optimizer that has a table's partitions."""

import types
import weakref

import keras
import numpy as np
import pytest

from keras_sparsity.exchange.layout import Layout
from keras_sparsity.update import state
from keras_sparsity.update.wrapper import OptimizerWrapper

NUM_ROWS, DIM = 5, 2


def built():
    """`(optimizer, table, variables)`: a dense variable, and two partitions."""
    dense = keras.Variable(np.ones(3), name="dense")
    pieces = [
        keras.Variable(np.ones((num_rows, DIM)), name=f"of_table_{num_rows}")
        for num_rows in (3, 2)
    ]
    one_rank = types.SimpleNamespace(
        rank=0, size=1, all_gather=lambda rows, name: rows
    )
    table = types.SimpleNamespace(
        layout=Layout(NUM_ROWS, 2),
        num_rows=NUM_ROWS,
        partitions=[types.SimpleNamespace(num_rows=n) for n in (3, 2)],
        collectives=one_rank,
        role="tables/table",
        given={},
    )
    optimizer = keras.optimizers.Adam(0.5)
    optimizer.build([*pieces, dense])
    of_table = types.SimpleNamespace(table=table)
    return optimizer, table, [(of_table, pieces), (dense, [dense])]


def test_slots_of_partitions_are_one_variable():
    optimizer, table, variables = built()
    places = state.places(optimizer, optimizer, variables)
    # Step and learning rate, then the moments of the table and the others.
    tables = [None, None, table, table, None, None]
    assert [of_table for of_table, _ in places] == tables
    first = np.arange(10.0).reshape(NUM_ROWS, DIM)
    values = [7, 0.25, first, first + 10, np.arange(3), np.arange(3) + 3]
    state.assign(places, [np.asarray(value) for value in values])
    for found, value in zip(state.read(places), values, strict=True):
        np.testing.assert_array_equal(found, value)
    _, (even, odd) = places[2]
    np.testing.assert_array_equal(even, first[::2])
    np.testing.assert_array_equal(odd, first[1::2])


def test_a_file_gets_one_variable_after_the_other():
    """So that no rank holds the slots of all tables at once."""
    optimizer, _, variables = built()
    places = state.places(optimizer, optimizer, variables)
    stored = []

    class Store:
        def __setitem__(self, key, value):
            assert not [each for _, each in stored if each() is not None]
            stored.append((key, weakref.ref(value)))

    wrapper = types.SimpleNamespace(
        places=lambda: places, state=lambda: state.read(places)
    )
    OptimizerWrapper.save_own_variables(wrapper, Store())
    assert [key for key, _ in stored] == list("012345")


def test_another_number_of_variables_is_refused():
    optimizer, _, variables = built()
    places = state.places(optimizer, optimizer, variables)
    with pytest.raises(ValueError, match=r"Received: 5. Expected: 6\."):
        state.assign(places, [np.zeros(1)] * 5)
