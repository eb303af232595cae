"""Chooses where each variable lives: nothing else tells placements apart."""

import dataclasses

import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity._tf import checks, contexts
from keras_sparsity.exchange import options
from keras_sparsity.exchange.layout import Layout
from keras_sparsity.placement.alone import Alone
from keras_sparsity.placement.gathered import Gathered
from keras_sparsity.placement.mirrored import Mirrored
from keras_sparsity.placement.owned import Owned
from keras_sparsity.placement.served import NaivelyServed, Served

# Set on a variable whose placement was found in `fit`: its name.
_ATTRIBUTE = "_keras_sparsity_placement"
# Set on that of an ordinary `Embedding` that could become a table's.
_MAY_BE_OWNED = "_keras_sparsity_may_be_owned"
_FIRST = {"tables": "ps", "others": "allgather"}  # of "auto"
# Of those that are found in `fit`: what variables other than tables can have.
_FOUND = ("allreduce", "allgather")
# An ordinary `Embedding` of more bytes begins as a table, under "auto": a
# process may not have the memory for all of it. Up to here, 2**22 elements of
# float32, its first values are drawn at once, see `tables.initial_values`.
_WHOLE_BYTES = 16 * 2**20
# By `entering`.
_given = []


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Names of the placements under one architecture of a strategy.

    Attributes:
        tables: of `ks.ShardedTable`s that name none themselves.
        others: of all other variables.
        merges: see `Options`.
        measures_times: whether measured times choose among placements.
    """

    tables: str
    others: str
    merges: bool = True
    measures_times: bool = False


ARCHITECTURES = {
    "auto": Architecture("auto", "auto"),
    "measured": Architecture("auto", "auto", measures_times=True),
    "hybrid": Architecture("ps", "allgather"),
    "allreduce": Architecture("allreduce", "allreduce"),
    "allgather": Architecture("allgather", "allgather"),
    "ps": Architecture("ps", "ps"),
    "naive_ps": Architecture("ps", "naive_ps", merges=False),
}


# With these, all variables may live at asynchronous servers.
ALL_AT_SERVERS = ("hybrid", "ps")


def without_moves(architecture):
    """The key of `ARCHITECTURES` with which no placement is to be found."""
    return "hybrid" if architecture == "auto" else architecture


def _on_servers(architecture):
    """The same, where dedicated servers are to own all tables."""
    if architecture.tables != "auto":
        return architecture
    return dataclasses.replace(architecture, tables="ps")


# Placements by their names: of tables, made of a function that returns the
# `Layout` of their rows over owners; and of other variables.
OF_TABLES = {
    "ps": lambda layout: Owned(layout()),
    "allgather": lambda layout: Gathered(),
    "allreduce": lambda layout: Mirrored(),
}
OF_OTHERS = {
    "ps": Served,
    "naive_ps": NaivelyServed,
    "allgather": Gathered,
    "allreduce": Mirrored,
}


def choose(name, size, layout=None):
    """The placement of a variable.

    Args:
        name: a key of `OF_TABLES` or `OF_OTHERS`.
        size: number of processes.
        layout: of a table, function that returns the `Layout` of its rows
            over owners; None for other variables.

    Returns:
        `Placement`.
    """
    if size == 1:
        return Alone()
    return OF_OTHERS[name]() if layout is None else OF_TABLES[name](layout)


def check(name, value):
    """Raises ValueError unless a value is an architecture of a strategy."""
    checks.check(
        isinstance(value, str) and value in ARCHITECTURES,
        name,
        value,
        f"one of {', '.join(map(repr, ARCHITECTURES))}",
    )


def check_table(name, value, otherwise=""):
    """Raises ValueError unless a value names the placement of a table.

    Args:
        name: name of the argument.
        value: its value.
        otherwise: other values of the argument, for the message.
    """
    checks.one_of(name, value, tuple(OF_TABLES), otherwise)


def check_requested(value):
    """Raises ValueError unless `ShardedTable` takes it as `architecture`."""
    if value is not None and not (isinstance(value, str) and value == "auto"):
        otherwise = ", 'auto', or None for the strategy's"
        check_table("architecture", value, otherwise)


class Placements:
    """The placements of the variables under one strategy.

    Args:
        architecture: a key of `ARCHITECTURES`.
        communicator: `Collectives` of all ranks.
        options: `Options`.
        strategy: the `tf.distribute.Strategy`, by which variables are updated.
    """

    def __init__(self, architecture, communicator, options, strategy):
        self.communicator = communicator
        self.options = options
        self.strategy = strategy
        self._architecture = ARCHITECTURES[architecture]
        if communicator.num_servers:
            self._architecture = _on_servers(self._architecture)
        size = communicator.size
        self._of_others = {name: choose(name, size) for name in OF_OTHERS}

    def of(self, variable):
        """The `Placement` of a model's variable."""
        table = getattr(variable, "table", None)
        if table is not None and table.placement is not None:
            return table.placement
        name = self._architecture.others
        if name == "auto":
            name = getattr(variable, _ATTRIBUTE, _FIRST["others"])
        return self._of_others[name]

    def of_table(self, table, name=None, num_partitions=None):
        """The `Placement` of a table.

        Args:
            table: the `ShardedTable`.
            name: by default the one that was asked for.
            num_partitions: by default as many as were asked for.
        """
        name = name or self.name_of_table(table)
        if name == "auto":
            name = _FIRST["tables"]
        return choose(
            name,
            self.communicator.size,
            lambda: table.layout_over_owners(num_partitions),
        )

    def name_of_table(self, table):
        """Name of the placement that was asked for, also `"auto"`."""
        return table.requested_architecture or self._architecture.tables

    def settles(self, table):
        """Whether a table is to be given the placement that was asked for."""
        return self.name_of_table(table) not in ("auto", table.architecture)

    def is_found(self, variable):
        """Whether the placement of a variable is to be found in `fit`."""
        table = getattr(variable, "table", None)
        if table is None:
            return self._architecture.others == "auto"
        return self.name_of_table(table) == "auto"

    def owns_rows_of(self, num_bytes):
        """Whether an ordinary `Embedding` of this size begins as a table.

        Then its rows are spread over the ranks, and it can get any placement
        that a table has.
        """
        name = self._architecture.others
        if self.communicator.size == 1:
            return False
        return name == "ps" or (name == "auto" and num_bytes > _WHOLE_BYTES)

    @property
    def is_of_strategy(self):
        """Whether a `HybridStrategy` has made it, and aggregates gradients."""
        return getattr(self.strategy, "placements", None) is self

    @property
    def measures_times(self):
        """Whether measured times choose the placements that are found."""
        return self._architecture.measures_times

    @property
    def finds_rows(self):
        """Whether placements of variables other than tables may be found."""
        return self._architecture.others == "auto"

    def candidates(self, variable):
        """Placements that a variable of rows may have: dict from names."""
        table = getattr(variable, "table", None)
        if table is None:
            found = {name: self._of_others[name] for name in _FOUND}
            if getattr(variable, _MAY_BE_OWNED, False):
                size = self.communicator.size
                found["ps"] = choose(
                    "ps", size, lambda: Layout(variable.shape[0], size)
                )
            return found
        names = ("allreduce", "ps", "allgather")
        return {name: self.of_table(table, name) for name in names}


def begins_spread(table):
    """Whether ranks share a table's rows, unless the strategy says otherwise.

    Args:
        table: the `ShardedTable`.
    """
    asked = table.requested_architecture
    return asked in (None, "auto", _FIRST["tables"])


def is_of_tables_alone(name):
    """Whether a variable must be a table's to get a placement in `fit`."""
    return name not in _FOUND


def found(variable, name):
    """Keeps the placement that was found for a variable that is no table's."""
    setattr(variable, _ATTRIBUTE, name)


def may_be_owned(variable, value):
    """Notes whether the variable of an `Embedding` could become a table's."""
    setattr(variable, _MAY_BE_OWNED, value)


def of_model(model):
    """`Placements` of the strategy that a model was compiled under."""
    strategy = getattr(model, "distribute_strategy", None)
    return getattr(strategy, "placements", None) or entered()


def entering(placements):
    """While entered, `entered` gives these `Placements`."""
    return contexts.on_top(_given, placements)


def entered():
    """`Placements` of the entered strategy; outside of any, of "hybrid".

    The one look-up of a step's optimizer and of a table that is built: all
    else is handed what it needs.
    """
    if _given:
        return _given[-1]
    strategy = tf.distribute.get_strategy()
    known = getattr(strategy, "placements", None)
    if known is not None:
        return known
    communicator = collectives.current()
    return Placements("hybrid", communicator, options.Options(), strategy)
