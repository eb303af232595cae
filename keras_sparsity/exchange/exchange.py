"""The facts of an exchange of rows, known before a step."""

import hashlib

from keras_sparsity.exchange.layout import Addresses
from keras_sparsity.exchange.lengths import Lengths
from keras_sparsity.exchange.machines import ThroughMachines
from keras_sparsity.exchange.routes import Direct


class Exchange:
    """How rows of some spread tables travel together.

    Args:
        groups: tuple of tuples of `ShardedTable`s. The tables of a group have
            one `Layout` and are asked for the same rows, side by side; all
            tables have one dtype.
        options: `Options` of the strategy.
        columns: `(start, stop)` of one table: the columns that owners send;
            None: all.
        cast_to: dtype that the receiver casts the rows to, None if unknown.

    Attributes:
        tables: list of all tables, group by group.
        communicator: `Collectives` of all ranks.
        role: beginning of the names of the messages.
        addresses: `Addresses` of the groups.
        pull_wire, push_wire: `Wire` or `RowWire` of rows, and of gradients.
        pulled_bytes: list of the bytes of each table's rows on their way.
        row_lengths: list of the length of each group's rows.
        width: length of all rows in memory: that of the longest.
        lengths: `Lengths` of the rows on their way; None if they have one.
        route: class of the `RowRoute`.
    """

    def __init__(self, groups, options, columns=None, cast_to=None):
        self.groups, self.options, self.columns = groups, options, columns
        self.tables = [table for group in groups for table in group]
        self.communicator = self.tables[0].collectives
        goes_through_machines = options.goes_through_machines(self.communicator)
        self.route = ThroughMachines if goes_through_machines else Direct
        self.role = _role_of(self.tables)
        self.addresses = Addresses([group[0] for group in groups])
        dtype = self.tables[0].variable.dtype
        start, stop = columns or (0, None)
        self.row_lengths = [
            len(range(sum(table.dim for table in group))[start:stop])
            for group in groups
        ]
        self.width = max(self.row_lengths)
        self.lengths = None
        if min(self.row_lengths) < self.width:
            self.lengths = Lengths(self.row_lengths, self.addresses)
        sent = self.width if self.lengths is None else self.lengths.width
        self.pull_wire = options.row_wire(dtype, sent, cast_to)
        self.pulled_bytes = [
            self.pull_wire.num_bytes(len(range(table.dim)[start:stop]))
            for table in self.tables
        ]
        self.push_wire = options.gradient_wire(
            dtype, sent, self.role, self.communicator.rank
        )


def exchange_of(requests, options, columns=None, cast_to=None):
    """The `Exchange` of some requests, made when it is first asked for.

    Args:
        requests: list of `(tables, ids)`.
        options, columns, cast_to: as for `Exchange`.
    """
    groups = tuple(dict.fromkeys(tuple(tables) for tables, _ in requests))
    tables = [table for group in groups for table in group]
    layouts = tuple(table.layout for table in tables)
    key = groups, layouts, options, columns, cast_to
    known = tables[0].exchanges
    if key not in known:
        known[key] = Exchange(groups, options, columns, cast_to)
    exchange = known[key]
    # For plans of the running model.
    for table, num_bytes in zip(tables, exchange.pulled_bytes, strict=True):
        table.messages, table.pulled_bytes = exchange.role, num_bytes
    return exchange


def _role_of(tables):
    """Beginning of the names of the messages of some tables."""
    roles = [table.role for table in tables]
    if len(roles) == 1:
        return roles[0]
    digest = hashlib.blake2b("+".join(roles).encode(), digest_size=4)
    return f"tables/{len(roles)} from {roles[0]}/{digest.hexdigest()}"
