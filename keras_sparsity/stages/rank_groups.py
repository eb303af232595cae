"""Groups of ranks that train the same calls: their bytes and times."""

import numpy as np

from keras_sparsity.stages.column_split import chosen_calls
from keras_sparsity.stages.machine_links import (
    link_seconds,
    machine_of,
    processor_seconds,
    ring_hops,
    shared_by,
)


class RankGroup:
    """Ranks that train the same calls, each on its part of a batch.

    Args:
        ranks: a range.
        num_examples: the number of examples of a batch.
    """

    def __init__(self, profile, cluster, ranks, num_examples):
        self.profile, self._cluster = profile, cluster
        self.ranks, self.num_examples = ranks, num_examples
        self._hops = ring_hops(ranks, cluster)
        self._size = max(1, len(ranks))
        self._examples = num_examples / self._size

    def parameter_bytes(self, calls):
        return sum(each.parameter_bytes for each in self._gradients(calls))

    def on_links(self, num_bytes):
        """Bytes that each machine sends if each rank sends some: an array."""
        return self._hops * num_bytes

    def ring_bytes(self, calls):
        """Bytes that each rank sends to sum the gradients."""
        dense = self.sum_bytes(self.dense_bytes(calls))
        return dense + self.gathered_bytes(calls)

    def sum_bytes(self, dense):
        """Those that it sends to sum so many by AllReduce."""
        return 2 * dense * (self._size - 1) / self._size

    def gathered_bytes(self, calls, num_examples=None):
        """Those of rows, which all ranks get.

        Args:
            calls: a slice.
            num_examples: of a rank; by default its part of the batch.
        """
        number = num_examples or self._examples
        rows = sum(each.row_bytes(number) for each in self._gradients(calls))
        return rows * (self._size - 1)

    def dense_bytes(self, calls):
        return sum(each.dense_bytes for each in self._gradients(calls))

    def summed_bytes(self, calls):
        return sum(each.summed_bytes for each in self._gradients(calls))

    def row_bytes(self, calls):
        """Bytes of the rows that each rank pulls and pushes."""
        return sum(
            each.owned_bytes(self._examples) for each in self._gradients(calls)
        )

    def owned_bytes(self, calls):
        """Bytes of these that leave each machine: an array."""
        here = np.bincount(
            machine_of(self.ranks, self._cluster),
            minlength=self._cluster.num_machines,
        )
        # As many arrive there.
        elsewhere = (len(self.ranks) - here) / self._size
        return here * elsewhere * self.row_bytes(calls)

    def num_exchanges(self, calls):
        """Messages after each other: numbers, rows and gradients of rows."""
        is_of_rows = self._hops.any() and self.row_bytes(calls)
        return 3 if is_of_rows else 0

    def message_seconds(self, num_bytes, num_messages):
        """Time of bytes on a link, and of the latency of messages."""
        return link_seconds(self._cluster, num_bytes, num_messages)

    @property
    def latency_seconds(self):
        """Time of a sum of gradients that have no bytes."""
        hops = 2 * (self._size - 1) if self._hops.any() else 0
        return self.message_seconds(0, hops)

    def seconds(self, calls, num_examples=None):
        """Time of the passes and the update; as for `gathered_bytes`."""
        passes = self.pass_seconds(calls, num_examples)
        return passes + self.update_seconds(calls)

    def pass_seconds(self, calls, num_examples=None):
        number = num_examples or self._examples
        return self._slower * sum(self.profile.pass_seconds(number, calls))

    def update_seconds(self, calls):
        return self._slower * sum(self.profile.update_seconds[calls])

    def at_processors(self, calls, num_bytes):
        """Time in which a processor sends and receives what ranks share.

        Args:
            calls: a slice, whose rows of sharded tables count.
            num_bytes: other bytes that each rank sends, to sum gradients.
        """
        if self._size < 2:
            return 0.0
        rows = self.row_bytes(calls)
        num_operations = bool(num_bytes) + 3 * bool(rows)
        num_bytes += rows * (self._size - 1) / self._size
        return self.processor_seconds(2 * num_bytes, 2 * num_operations)

    def processor_seconds(self, num_bytes, num_messages):
        """That of some messages of each rank that shares the processor."""
        busy = shared_by(self._cluster, self._size)
        return busy * processor_seconds(self._cluster, num_bytes, num_messages)

    @property
    def _slower(self):
        busy = shared_by(self._cluster, self._size)
        return busy / self._cluster.relative_speed

    def _gradients(self, calls):
        return self.profile.gradients[calls]


class TailGroup:
    """The tail workers, which divide a batch or columns.

    Args:
        group: their `RankGroup`.
        calls: a slice of the tail's calls.
        has_columns: whether they divide columns.
    """

    def __init__(self, group, calls, has_columns):
        self.group, self.calls = group, calls
        self.split = "columns" if has_columns else "batch"
        self._columns = {}
        if has_columns:
            sizes = group.profile.columns[calls]
            chosen = chosen_calls(sizes, group.num_examples)
            self._columns = {i: sizes[i] for i in chosen}

    def ring_bytes(self, arriving):
        """Bytes that each tail worker sends to the others.

        Args:
            arriving: bytes of the activations of all workers.
        """
        group, number = self.group, self.group.num_examples
        if not self._columns:
            return group.ring_bytes(self.calls)
        columns = self._columns.values()
        dense = group.dense_bytes(self.calls)
        # All of its parts but a rank's own travel once, of sums twice.
        once = arriving + sum(each.traveling_bytes(number) for each in columns)
        twice = dense - sum(each.kernel_bytes for each in columns)
        rows = group.gathered_bytes(self.calls, number)
        return group.sum_bytes(twice + once / 2) + rows

    def seconds(self):
        """Time of the passes and the update."""
        group = self.group
        if not self._columns:
            # The workers wait while a single tail worker computes.
            is_alone = len(group.ranks) == 1
            crowding = group.profile.crowding if is_alone else 1.0
            return group.seconds(self.calls) / crowding
        first = self.calls.start
        found = group.seconds(self.calls, group.num_examples)
        for place, size in self._columns.items():
            call = slice(first + place, first + place + 1)
            found -= group.pass_seconds(call, group.num_examples)
            found += group.pass_seconds(call)
            # Of the kernel each updates its own columns.
            others = 1 - 1 / len(group.ranks)
            share = size.kernel_bytes / group.dense_bytes(call)
            found -= others * share * group.update_seconds(call)
        return found

    def latency_seconds(self):
        """That of sums of gradients, and of what the layers wait for."""
        # Activations; outputs of layers, and gradients of their inputs.
        rounds = 1 + (1 + 3 * len(self._columns)) / 2 * bool(self._columns)
        return rounds * self.group.latency_seconds

    def at_processors(self, num_bytes):
        """Time in which a processor sends and receives so many of a rank."""
        if len(self.group.ranks) < 2:
            return 0.0
        num_operations = 1 + (1 + 2 * len(self._columns)) * bool(self._columns)
        return self.group.processor_seconds(2 * num_bytes, 2 * num_operations)
