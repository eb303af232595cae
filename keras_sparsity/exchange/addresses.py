"""Where the rows of several tables are, at their owners."""

import collections

import numpy as np
import tensorflow as tf

from keras_sparsity.collectives.engine import num_up_to
from keras_sparsity.exchange.layout import local_row_of, partition_of
from keras_sparsity.planning.transfer_cost import narrowest_index

# By their number of bytes.
_INTEGERS = {2: tf.uint16, 4: tf.int32, 8: tf.int64}

# One of this rank's partitions with rows: the index of its table among all,
# its place among the rank's partitions of it, its number, its first address.
Piece = collections.namedtuple("Piece", "table slot partition start")


def narrowest(num_rows):
    """Dtype in which rows' numbers travel; its largest value is no row's."""
    return _INTEGERS[narrowest_index(num_rows)]


class Addresses:
    """One space of addresses at each owner, over the rows of several tables.

    So that the rows of several tables travel together, each row has one
    number among those of all tables, and an address among those of its owner:
    in the narrowest integer that holds them, as one travels for each row that
    is asked for. The largest value of that integer is no address.

    Args:
        tables: list of spread `ShardedTable`s of the same processes.

    Attributes:
        largest: no address is as large.
        dtype: of addresses.
        row_dtype: of the rows' numbers.
        first_rows: the number of each table's first row.
        first_addresses: array `(ranks, tables)` of where each begins.
        pieces: list of this rank's `Piece`s, by their first address.
    """

    def __init__(self, tables):
        ranks = tables[0].collectives
        counts = [table.layout.num_partitions for table in tables]
        ends = np.cumsum([table.num_rows for table in tables])
        self.first_rows = [0, *ends[:-1].tolist()]
        self._ends = ends
        self._counts = np.array(counts)
        self._first_partitions = np.cumsum([0, *counts])[:-1]
        self._owners = np.zeros(sum(counts), np.int64)
        self._starts = np.zeros(sum(counts), np.int64)
        self.first_addresses = np.zeros((ranks.size, len(tables)), np.int64)
        self.pieces = []
        largest = 0
        for rank in range(ranks.size):
            start = 0
            for index, table in enumerate(tables):
                self.first_addresses[rank, index] = start
                owned = table.layout.owned_partitions(rank)
                for slot, partition in enumerate(owned):
                    place = self._first_partitions[index] + partition
                    self._owners[place], self._starts[place] = rank, start
                    num_rows = table.layout.num_rows_of(partition)
                    if rank == ranks.rank and num_rows:
                        self.pieces.append(Piece(index, slot, partition, start))
                    start += num_rows
            largest = max(largest, start)
        self.largest = largest
        self.dtype = narrowest(largest)
        self.row_dtype = tf.int32 if ends[-1] < tf.int32.max else tf.int64

    def locate(self, rows):
        """Owner and address of each row, given by its number: its dtype."""

        def of(array, index):
            return tf.gather(tf.constant(array, rows.dtype), index)

        table = 0
        if len(self._ends) > 1:
            ends = tf.constant(self._ends, rows.dtype)
            table = num_up_to(ends, rows)
            rows -= of(self.first_rows, table)
        count = of(self._counts, table)
        partition = of(self._first_partitions, table)
        partition += partition_of(rows, count)
        address = of(self._starts, partition) + local_row_of(rows, count)
        return of(self._owners, partition), address


# Sent in place of addresses: two int64 numbers behind a mark.


def mark(numbers, dtype):
    """A message that `is_marked` finds among addresses of a dtype."""
    numbers = tf.reshape(tf.bitcast(numbers, dtype), [-1])
    return tf.concat([tf.constant([dtype.max], dtype), numbers], axis=0)


def is_marked(received):
    """Of each element, whether such a message begins with it."""
    return tf.equal(tf.cast(received, tf.int64), received.dtype.max)


def marked(received):
    """The numbers of the first such message, int64 `(2,)`; or zeros."""
    marks = is_marked(received)

    def read():
        start = tf.argmax(tf.cast(marks, tf.int32)) + 1
        width = tf.int64.size // received.dtype.size
        numbers = tf.slice(received, [start], [2 * width])
        shape = [2] if width == 1 else [2, width]
        return tf.bitcast(tf.reshape(numbers, shape), tf.int64)

    return tf.cond(tf.reduce_any(marks), read, lambda: tf.zeros([2], tf.int64))
