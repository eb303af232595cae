"""Whole tables, read in a step and outside of it."""

import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.tables import whole
from tests.conftest import engines

# Rows and partitions: as many as ranks, several at a rank, and more than rows.
SHAPES = [(7, 2), (7, 5), (5, 8), (1, 3)]


def read(shapes):
    """A table's values against those that it was given, on this rank."""
    strategy = ks.HybridStrategy(architecture="hybrid")
    for num_rows, num_partitions in shapes:
        table = ks.ShardedTable(num_rows, 3, num_partitions=num_partitions)
        values = np.arange(num_rows * 3.0).reshape(num_rows, 3)
        table.assign(values)
        np.testing.assert_array_equal(table.read(), values)
        in_step = strategy.run(
            tf.function(lambda table=table: whole.tensor(table))
        )
        np.testing.assert_array_equal(in_step, values)
        stored = strategy.collectives.gather_objects(
            len(whole.stored_rows(table)) if table.is_sharded else num_rows
        )
        assert sum(stored) == num_rows


def test_one_process():
    read(SHAPES)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_partitions_without_rows_add_none(engine, cluster):
    cluster(engine, 2).run(read, SHAPES)
