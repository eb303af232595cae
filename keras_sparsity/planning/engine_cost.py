"""Bytes of one step as this library sends them, by engine."""

import math

import numpy as np

from keras_sparsity._tf import checks
from keras_sparsity.machines.capacities import capacity
from keras_sparsity.machines.settings import ENGINES
from keras_sparsity.planning.specs import (
    Cluster,
    VariableSpec,
    check_is,
    dtype_bytes,
)
from keras_sparsity.planning.transfer_cost import (
    ARCHITECTURES,
    check_first_machine,
    merged,
    narrowest_index,
    on_each,
    parameter_server,
    shares,
    transfer_bytes,
)

# Gathered rows and indices are padded together, as words of 16 bits.
_WORD_BYTES = 2


def engine_bytes(
    variable,
    architecture,
    cluster,
    engine,
    largest_rows=None,
    first_machine=0,
    local_aggregation=True,
    pulled_bytes=None,
):
    """Bytes that this library moves for one variable, by machine.

    As `transfer_bytes` of unique rows, with indices in the narrowest integer
    that holds them, but "ps" of a sparse variable is a `sharded_table_bytes`,
    and the native engine pads the rows that it exchanges. Under "ps", a dense
    gradient is summed in even parts at all processes, or at one of them if
    the variable has one partition. With w its bytes, a machine sends, and
    receives, in the first case

        2 L w (N-1)/N

    and with local aggregation, in which a machine's processes sum before they
    push, 2 w (N-1)/N. The native engine pads each part to the next capacity,
    and parts for one server to those for all.

    Args:
        variable: `VariableSpec`.
        architecture: `"allreduce"`, `"ps"` or `"allgather"`.
        cluster: `Cluster`.
        engine: `"native"`, `"horovod"`, or `"local"`, which moves nothing.
        largest_rows: as for `sharded_table_bytes`.
        first_machine: as for `transfer_bytes`, of a dense variable.
        local_aggregation: as for `sharded_table_bytes`; under "ps" of a dense
            variable, too.
        pulled_bytes: as for `sharded_table_bytes`.

    Returns:
        `TransferBytes`.

    Raises:
        ValueError: as `transfer_bytes` and `sharded_table_bytes`, or if the
            engine is unknown.

    Example:

    >>> table = VariableSpec("table", (1000, 64), alpha=0.02)
    >>> for engine in ENGINES:
    ...     cost = engine_bytes(table, "allgather", Cluster(4), engine)
    ...     print(engine, round(cost.busiest_bytes))
    local 0
    native 33792
    horovod 30960

    References:
        EuroSys 3.1.
    """
    checks.one_of("engine", engine, ENGINES)
    checks.one_of("architecture", architecture, ARCHITECTURES)
    check_is(variable, VariableSpec, "variable")
    check_is(cluster, Cluster, "cluster")
    if engine == "local":
        return on_each(cluster, 0)
    if architecture in _OF_ROWS and variable.is_sparse:
        of_rows = _OF_ROWS[architecture]
        return of_rows(
            variable.of_rows,
            cluster,
            engine == "native",
            largest_rows,
            local_aggregation,
            pulled_bytes,
        )
    if architecture in _OF_DENSE:
        of_dense = _OF_DENSE[architecture]
        return of_dense(
            variable,
            cluster,
            engine == "native",
            first_machine,
            local_aggregation,
        )
    return transfer_bytes(
        variable,
        architecture,
        cluster,
        index_bytes=_index_of_all(variable),
        first_machine=first_machine,
    )


def _served(variable, cluster, padded, first_machine, local_aggregation):
    """A dense gradient that servers sum."""
    check_first_machine(first_machine, cluster)
    is_even = variable.num_partitions in (None, cluster.size)
    if padded:
        largest = variable.num_elements / cluster.size
        if not is_even:
            largest = variable.num_elements * max(
                shares(variable, cluster, cluster.size)
            )
        part = capacity(math.ceil(largest - 1e-9))
        part *= dtype_bytes("dtype", variable.dtype)
        local_size = cluster.processes_per_machine
        others = cluster.size - local_size
        if local_aggregation:
            others = cluster.num_machines - 1
        return on_each(cluster, 2 * local_size * others * part)
    owned = np.full(cluster.num_machines, 1 / cluster.num_machines)
    if not is_even:
        owned = shares(variable, cluster, cluster.num_machines)
        owned = np.roll(owned, first_machine)
    return parameter_server(
        variable,
        variable.num_bytes(),
        cluster,
        owned,
        "both" if local_aggregation else "none",
        pull_index_bytes=0,
        push_index_bytes=0,
    )


def sharded_table_bytes(
    variable,
    cluster,
    padded=False,
    largest_rows=None,
    local_aggregation=True,
    pulled_bytes=None,
):
    """Bytes of a `ShardedTable` of this library, by machine.

    A table is a parameter server whose servers are the workers. Each process
    sends the addresses of the unique rows that it needs to their owners, as
    the narrowest integer (i bytes), and receives the rows. The gradients, one
    for each row, follow the route of the ids and need none. In terms of
    `transfer_bytes`, "ps" with

        pull = L alpha w
        push = L alpha w + i L alpha num_rows

    With local aggregation the processes of a machine pull together and sum
    their gradients: alpha_machine replaces L alpha. Rows that their owner
    casts or slices before sending are pulled in fewer bytes.

    The native engine sends parts of even size: each is padded to the largest
    part between two ranks, and this to the next capacity. There are 8
    capacities to an octave, so padding adds at most 12.5 %. With c(n) the
    capacity of n elements, n the largest number of rows,
    d their number of elements, and b the bytes of one, a machine sends, and
    receives,

        L (S-L) (i c(n) + 2 b c(n d))

    and with local aggregation, in which each process exchanges with one of
    each other machine, L (N-1) times the last brackets.

    Args:
        variable: `VariableSpec` of a sparse variable, which travels in its
            own dtype.
        cluster: `Cluster`.
        padded: whether parts are padded, as by the native engine, or not, as
            by Horovod.
        largest_rows: the largest number of rows that one process asks of one
            owner, if measured; only padded messages depend on it. By default
            that of rows that are touched evenly, and real ids come to more.
        local_aggregation: whether the processes of a machine pull and push
            together, as those of a strategy do by default.
        pulled_bytes: bytes of a pulled row, by default those of the whole
            row in the variable's dtype.

    Returns:
        `TransferBytes`.

    Raises:
        ValueError: if an argument has another type or range, or the variable
            is dense.

    Example:

    >>> table = VariableSpec("table", (1000, 64), alpha=0.02)
    >>> cost = sharded_table_bytes(table, Cluster(num_machines=4))
    >>> round(cost.busiest_bytes), round(max(cost.index_bytes))
    (15420, 60)
    >>> cost = sharded_table_bytes(table, Cluster(4), padded=True)
    >>> round(cost.busiest_bytes)
    15456

    References:
        EuroSys 3.1 (pull and push), 4.3 (servers beside workers).
    """
    check_is(variable, VariableSpec, "variable")
    checks.check(
        variable.is_sparse,
        "variable",
        variable,
        "sparse: give it the `alpha` that one worker touches",
    )
    check_is(cluster, Cluster, "cluster")
    checks.boolean("padded", padded)
    checks.boolean("local_aggregation", local_aggregation)
    _check_count("largest_rows", largest_rows, "rows")
    _check_count("pulled_bytes", pulled_bytes, "bytes")
    most = shares(variable, cluster, cluster.size).max() * variable.shape[0]
    id_bytes = narrowest_index(math.ceil(most - 1e-9))
    if padded:
        return _padded_table(
            *(variable, cluster, most, id_bytes),
            *(largest_rows, local_aggregation, pulled_bytes),
        )
    pulled = None
    if pulled_bytes is not None:
        pulled = pulled_bytes * variable.shape[0]
    return parameter_server(
        variable,
        variable.num_bytes(),
        cluster,
        shares(variable, cluster, cluster.num_machines),
        "both" if local_aggregation else "none",
        pull_index_bytes=id_bytes,
        push_index_bytes=0,
        pulled=pulled,
    )


def _check_count(name, value, of_what):
    checks.check(
        value is None or (checks.is_number(value) and 0 <= value < math.inf),
        name,
        value,
        f"None or a number of {of_what}",
    )


def _padded_table(
    variable,
    cluster,
    most,
    id_bytes,
    largest_rows,
    local_aggregation,
    pulled_bytes,
):
    """`sharded_table_bytes` of parts that are padded.

    Args:
        most: rows of the busiest owner.
        id_bytes: bytes of an address.
    """
    local_size = cluster.processes_per_machine
    alpha, others = variable.alpha, cluster.size - local_size
    if local_aggregation:
        alpha, others = merged(variable, cluster), cluster.num_machines - 1
    if largest_rows is None:
        # Not above the next whole number by a rounding error alone.
        largest_rows = alpha * most - 1e-9
    largest_rows = math.ceil(largest_rows)
    dim = math.prod(variable.shape[1:])
    pairs = local_size * others
    ids = pairs * capacity(largest_rows) * id_bytes
    element_bytes = dtype_bytes("dtype", variable.dtype)
    rows = pairs * capacity(largest_rows * dim) * element_bytes
    pulled = 1 if pulled_bytes is None else pulled_bytes / (dim * element_bytes)
    return on_each(cluster, ids + rows * (1 + pulled), index_bytes=2 * ids)


def _index_of_all(variable):
    return narrowest_index(variable.shape[0]) if variable.is_sparse else 0


def _gathered_rows(variable, cluster, padded, *of_tables):
    """Arguments as `sharded_table_bytes`, those of tables unused."""
    del of_tables
    if not padded:
        index_bytes = _index_of_all(variable)
        return transfer_bytes(
            variable, "allgather", cluster, index_bytes=index_bytes
        )
    num_rows = math.ceil(variable.alpha * variable.shape[0] - 1e-9)
    row_bytes = math.prod(variable.shape[1:])
    row_bytes *= dtype_bytes("dtype", variable.dtype)
    hops = cluster.size - 1
    ids = num_rows * _index_of_all(variable)
    words = (ids + num_rows * row_bytes) / _WORD_BYTES
    sent = hops * capacity(math.ceil(words)) * _WORD_BYTES
    return on_each(cluster, sent, 2 * hops * ids)


# As this library sends them: an engine may pad their number.
_OF_ROWS = {"ps": sharded_table_bytes, "allgather": _gathered_rows}
_OF_DENSE = {"ps": _served}
