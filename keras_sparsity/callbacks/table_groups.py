"""Tables that get the same number of partitions, and the memory they take."""

import dataclasses
import math

import tensorflow as tf

from keras_sparsity.planning.partition_search import (
    PartitionSampler,
    busiest_rows,
)

# The group of the tables that have none of their own.
_DEFAULT_GROUP = "tables"


@dataclasses.dataclass
class TableGroup:
    """Tables that get the same number of partitions.

    Args:
        name: the group's.
        tables: list of spread `ShardedTable`.
        sampler: `PartitionSampler` of this group.
        first: dict from each table to the number of partitions it had before
            the search.
    """

    name: str
    tables: list
    sampler: PartitionSampler
    first: dict

    def counts(self, num_partitions):
        """The argument of `moves.repartition`."""
        return dict.fromkeys(self.tables, num_partitions)


class TableMemory:
    """Memory of tables and their slots at the busiest owner.

    All tables have the same busiest owner: the first one.

    Args:
        tables: list of spread `ShardedTable`.
        optimizers: list of the built `HybridOptimizer`s with their slots.
        limit_bytes: most memory in each process, or None.
    """

    def __init__(self, tables, optimizers, limit_bytes):
        self.limit_bytes = limit_bytes
        self._tables = tables
        self._row_bytes = {}
        for table in tables:
            slots = [
                pieces[0]
                for optimizer in optimizers
                for of_table, pieces in optimizer.places()
                if of_table is table
            ]
            self._row_bytes[table] = sum(
                math.prod(variable.shape[1:]) * tf.as_dtype(variable.dtype).size
                for variable in [table.partitions[0], *slots]
            )

    def busiest_bytes(self, counts):
        """Bytes at the busiest owner.

        Args:
            counts: dict from tables to numbers of partitions. Of others, the
                present number counts.
        """
        return sum(
            self._row_bytes[table]
            * busiest_rows(
                table.num_rows,
                counts.get(table, table.layout.num_partitions),
                table.layout.num_owners,
            )
            for table in self._tables
        )

    def allows(self, counts):
        return (
            self.limit_bytes is None
            or self.busiest_bytes(counts) <= self.limit_bytes
        )


def groups_of(tables, memory, start, per_table):
    """The groups to search, a list of `TableGroup`.

    Args:
        tables: list of spread `ShardedTable`.
        memory: their `TableMemory`.
        start: the first number of partitions to try, or the next that the
            memory allows.
        per_table: whether each table without a group is one by itself.

    Raises:
        ValueError: if the memory allows no number of partitions.
    """
    by_name = {}
    for table in tables:
        name = table.partition_group
        if name is None:
            name = table.owner_name if per_table else _DEFAULT_GROUP
        by_name.setdefault(name, []).append(table)
    return [
        _group(name, of_group, memory, start)
        for name, of_group in by_name.items()
    ]


def _group(name, tables, memory, start):
    num_rows = max(table.num_rows for table in tables)
    size = tables[0].layout.num_owners

    def allowed(count):
        # More partitions than rows would be empty ones.
        return count <= max(num_rows, size) and memory.allows(
            dict.fromkeys(tables, count)
        )

    start = min(start, num_rows)
    # No number is better balanced than a multiple of the size.
    enough = max(size, -(-start // size) * size)
    allowed_start = next(filter(allowed, range(start, enough + 1)), None)
    if allowed_start is None:
        needed = memory.busiest_bytes(dict.fromkeys(tables, enough))
        raise ValueError(
            "`memory_limit_bytes` is less than the tables with their slots "
            f"take, however '{name}' is partitioned. Received: "
            f"memory_limit_bytes={memory.limit_bytes}. Expected: at least "
            f"{needed}, with {enough} partitions on {size} processes. Raise "
            "it, or train on more processes."
        )
    return TableGroup(
        name,
        tables,
        PartitionSampler(size, allowed_start, allowed),
        {table: table.layout.num_partitions for table in tables},
    )
