"""Which partition, which process and which local row a table's row lives in."""

import dataclasses

import numpy as np
import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the rows of one table are spread over partitions and owners.

    Row `r` is row `r // num_partitions` of partition `r % num_partitions`:
    the modulo spreads the frequent low ids of a Zipf distribution over all
    partitions. Partition `p` belongs to `owners[p % len(owners)]`; `owners`
    lists the ranks machine by machine (the first process of every machine,
    then the second, ...), so that few partitions still use all machines.

    Args:
        num_rows: rows of the whole table.
        num_partitions: number of partitions, at least 1. May exceed the
            number of rows or of processes: some partitions are then empty, or
            an owner has several.
        owners: ranks in the order in which they are given partitions.

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
        if sorted(self.owners) != list(range(len(self.owners))):
            raise ValueError(
                "`owners` must list every rank once. "
                f"Received: owners={self.owners}."
            )

    @property
    def num_owners(self):
        return len(self.owners)

    def owned_partitions(self, rank):
        """Partitions of `rank`, in the order in which it stores them."""
        position = self.owners.index(rank)
        return list(range(position, self.num_partitions, self.num_owners))

    def num_rows_of(self, partition):
        return max(0, -(-(self.num_rows - partition) // self.num_partitions))

    def rows_of(self, partition):
        """Ids of a partition's rows, by local row: an int64 array."""
        return np.arange(partition, self.num_rows, self.num_partitions)

    def num_stored_rows(self):
        """Number of rows of each rank: a list."""
        return [
            sum(self.num_rows_of(p) for p in self.owned_partitions(rank))
            for rank in range(self.num_owners)
        ]

    # The same, on tensors of ids.

    def owner(self, ids):
        """Rank that owns each row: int32, of the shape of `ids`."""
        if self.num_owners == 1:
            return tf.zeros_like(ids, dtype=tf.int32)
        position = (ids % self.num_partitions) % self.num_owners
        return tf.gather(tf.constant(self.owners, tf.int32), position)

    def slot(self, ids):
        """Index of each row's partition among its owner's: int32."""
        return tf.cast((ids % self.num_partitions) // self.num_owners, tf.int32)

    def local_row(self, ids):
        """Row inside the partition, of the dtype of `ids`."""
        return ids // self.num_partitions

    def stored_position(self, ids):
        """Position of each row when all ranks' parts are concatenated."""
        starts = np.zeros(self.num_partitions, np.int64)
        start = 0
        for rank in range(self.num_owners):
            for partition in self.owned_partitions(rank):
                starts[partition] = start
                start += self.num_rows_of(partition)
        starts = tf.constant(starts, ids.dtype)
        return tf.gather(starts, ids % self.num_partitions) + (
            self.local_row(ids)
        )


def default_owners(topology):
    """Ranks in the order in which they are given partitions.

    Args:
        topology: one `(local_rank, cross_rank)` for every rank.

    Returns:
        Tuple of ranks, first those with local rank 0, machine by machine.

    Example:

    >>> default_owners([(0, 0), (1, 0), (0, 1), (1, 1)])
    (0, 2, 1, 3)
    """
    return tuple(sorted(range(len(topology)), key=lambda rank: topology[rank]))
