"""Rows that owners read and update, against NumPy's, by their addresses."""

import types

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.exchange.exchange import Exchange
from keras_sparsity.exchange.layout import Layout
from keras_sparsity.exchange.options import Options
from keras_sparsity.exchange.owned_rows import OwnedRows

SIZE = 3
# Groups of tables by rows, partitions, owners and dims. Rank 2 has no rows:
# each of its tables holds one of zeros.
GROUPS = [
    (7, 3, (0, 1), (2, 3)),
    (5, 4, (1, 0), (4,)),
    (6, 1, (1,), (1,)),
]


def tables_of(rank, num_rows, count, owners, dims):
    """The tables of one group, and the values of all rows."""
    values = [
        np.random.default_rng([num_rows, d]).normal(size=(num_rows, d))
        for d in dims
    ]
    owned = [p for p in range(count) if owners[p % len(owners)] == rank]
    tables = [
        types.SimpleNamespace(
            collectives=types.SimpleNamespace(
                rank=rank, size=SIZE, machines=(0,) * SIZE
            ),
            dim=of_table.shape[1],
            num_rows=num_rows,
            layout=Layout(num_rows, count, owners),
            role=f"tables/{num_rows}/{of_table.shape[1]}",
            variable=types.SimpleNamespace(dtype="float64"),
            partitions=[
                types.SimpleNamespace(value=tf.Variable(part))
                for part in [of_table[p::count] for p in owned]
                or [np.zeros((1, of_table.shape[1]))]
            ],
        )
        for of_table in values
    ]
    rows = [row for p in owned for row in range(p, num_rows, count)]
    return tables, values, rows


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("numbers", [[0, 1, 2], [0], [1, 0], [2]])
def test_rows_and_gradients_are_those_of_their_tables(rank, numbers):
    groups, values, rows = zip(
        *[tables_of(rank, *GROUPS[number]) for number in numbers], strict=True
    )
    exchange = Exchange(tuple(map(tuple, groups)), Options())
    # By address; each is asked for by two ranks, in any order.
    places = [(g, row) for g, of_group in enumerate(rows) for row in of_group]
    random = np.random.default_rng(rank)
    addresses = random.permutation(np.repeat(np.arange(len(places)), 2))
    owned = OwnedRows(exchange, tf.constant(addresses, tf.int32))
    width = max(sum(table.dim for table in group) for group in groups)
    expected = np.zeros((len(addresses), width))
    for number, address in enumerate(addresses):
        group, row = places[address]
        found = np.concatenate([each[row] for each in values[group]])
        expected[number, : len(found)] = found
    np.testing.assert_array_equal(owned.rows(), expected)
    # As gradients, the same numbers: each table gets its rows back.
    gradients = owned.gradients(tf.constant(expected))
    for table, gradient in zip(exchange.tables, gradients, strict=True):
        assert gradient.dense_shape.numpy().tolist() == [
            table.num_rows,
            table.dim,
        ]
        (group,) = [g for g, tables in enumerate(groups) if table in tables]
        of_table = values[group][groups[group].index(table)]
        ids = [places[a][1] for a in addresses if places[a][0] == group]
        assert gradient.indices.numpy().tolist() == ids
        np.testing.assert_array_equal(gradient.values, of_table[ids])
