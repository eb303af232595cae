"""Which partition, which rank and which local row hold a table's row.

The only place that knows the rule: row `r` is row `r // num_partitions` of
partition `r % num_partitions`. The modulo spreads the frequent low ids of a
Zipf distribution over all partitions. `Addresses` number the rows of several
tables, also those of one owner.
"""

import collections
import dataclasses
import math

import numpy as np
import tensorflow as tf

from keras_sparsity.collectives.engine import num_up_to
from keras_sparsity.planning.transfer_cost import narrowest_index

# The rule, for ints, arrays and tensors of one integer dtype.


def partition_of(rows, num_partitions):
    """The partition of each row."""
    return rows % num_partitions


def local_row_of(rows, num_partitions):
    """The place of each row inside its partition."""
    return rows // num_partitions


def row_of(partitions, local_rows, num_partitions):
    """The row at each local row of each partition: the inverse of the two.

    Example:

    >>> row_of(partition_of(17, 5), local_row_of(17, 5), 5)
    17
    """
    return local_rows * num_partitions + partitions


def common_rows(first, second, num_rows):
    """The rows that two partitions of two numbers of partitions share.

    Args:
        first, second: `(partition, num_partitions)`.
        num_rows: rows of the whole table.

    Returns:
        A `range`, which may be empty.

    Example:

    >>> list(common_rows((1, 2), (0, 3), num_rows=12))
    [3, 9]
    """
    step = math.lcm(first[1], second[1])
    for row in range(first[0], min(step, num_rows), first[1]):
        if partition_of(row, second[1]) == second[0]:
            return range(row, num_rows, step)
    return range(0, 0, step)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the rows of one table are spread over partitions and owners.

    Partition `p` belongs to `owners[p % len(owners)]`; `owners` lists the
    ranks machine by machine (the first process of every machine, then the
    second, ...), so that few partitions still use all machines. Other ranks
    own no rows.

    Args:
        num_rows: rows of the whole table.
        num_partitions: number of partitions, at least 1. May exceed the
            number of rows or of processes: some partitions are then empty, or
            an owner has several.
        owners: ranks in the order in which they are given partitions.

    Raises:
        ValueError: if there is no partition, no owner, or one twice.

    Example:

    >>> layout = Layout(num_rows=7, num_partitions=3, owners=(0, 1))
    >>> layout.owned_partitions(rank=0)
    [0, 2]
    >>> [int(row) for row in layout.rows_of(2)]
    [2, 5]
    >>> layout.num_rows_of(0)
    3

    References:
        EuroSys 3.2 (partitioning), 4.2 (placement).
    """

    num_rows: int
    num_partitions: int
    owners: tuple = (0,)

    def __post_init__(self):
        if self.num_partitions < 1:
            raise ValueError(
                "`num_partitions` must be at least 1. "
                f"Received: num_partitions={self.num_partitions}."
            )
        ranks = set(self.owners)
        if not ranks or len(ranks) < len(self.owners) or min(ranks) < 0:
            raise ValueError(
                "`owners` must list ranks, each once. "
                f"Received: owners={self.owners}."
            )

    # Partitions.

    @property
    def num_owners(self):
        return len(self.owners)

    def owned_partitions(self, rank):
        """Partitions of `rank`, in the order in which it stores them."""
        if rank not in self.owners:
            return []
        position = self.owners.index(rank)
        return list(range(position, self.num_partitions, self.num_owners))

    def num_rows_of(self, partition):
        return max(0, -(-(self.num_rows - partition) // self.num_partitions))

    def rows_of(self, partition):
        """Ids of a partition's rows, by local row: an int64 array."""
        return np.arange(partition, self.num_rows, self.num_partitions)

    def owned_rows(self, rank):
        """Ids of a rank's rows, as it stores them: an int64 array."""
        owned = [self.rows_of(p) for p in self.owned_partitions(rank)]
        return np.concatenate([np.zeros(0, np.int64), *owned])

    def num_stored_rows(self, rank):
        """Number of rows of a rank."""
        return sum(self.num_rows_of(p) for p in self.owned_partitions(rank))

    # Rows, as tensors of ids.

    def owner(self, ids):
        """Rank that owns each row: int32, of the shape of `ids`."""
        if self.num_owners == 1:
            return tf.zeros_like(ids, dtype=tf.int32) + self.owners[0]
        position = partition_of(ids, self.num_partitions) % self.num_owners
        return tf.gather(tf.constant(self.owners, tf.int32), position)

    def owned_index(self, ids):
        """Place of each row's partition among its owner's: int32."""
        partition = partition_of(ids, self.num_partitions)
        return tf.cast(partition // self.num_owners, tf.int32)

    def local_row(self, ids):
        """Row inside the partition, of the dtype of `ids`."""
        return local_row_of(ids, self.num_partitions)

    def stored_position(self, ids):
        """Position of each row when all ranks' parts are concatenated."""
        starts = np.zeros(self.num_partitions, np.int64)
        start = 0
        for rank in sorted(self.owners):
            for partition in self.owned_partitions(rank):
                starts[partition] = start
                start += self.num_rows_of(partition)
        starts = tf.constant(starts, ids.dtype)
        partition = partition_of(ids, self.num_partitions)
        return tf.gather(starts, partition) + self.local_row(ids)


def default_owners(topology, num_servers=0):
    """Ranks in the order in which they are given partitions.

    Args:
        topology: one `(local_rank, cross_rank)` for every rank.
        num_servers: number of dedicated servers, the last ranks, which then
            are the owners.

    Returns:
        Tuple of ranks, first those with the lowest local rank, machine by
        machine.

    Example:

    >>> default_owners([(0, 0), (1, 0), (0, 1), (1, 1)])
    (0, 2, 1, 3)
    """
    size = len(topology)
    ranks = range(size - num_servers if num_servers else 0, size)
    return tuple(sorted(ranks, key=lambda rank: topology[rank]))


# Rows of several tables.

# One of this rank's partitions with rows: the index of its table among all,
# its place among the rank's partitions of it, its number, its first address.
Piece = collections.namedtuple("Piece", "table slot partition start")
# By their number of bytes.
_INTEGERS = {2: tf.uint16, 4: tf.int32, 8: tf.int64}


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
