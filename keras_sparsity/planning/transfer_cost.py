"""Bytes that machines send and receive for a variable in one step."""

import dataclasses
import math

import numpy as np

from keras_sparsity import checks
from keras_sparsity.planning.specs import (
    Cluster,
    VariableSpec,
    check_is,
    dtype_bytes,
    is_number,
)

# Where two cost the same, the earlier is chosen: see `plan`.
ARCHITECTURES = ("allreduce", "ps", "allgather")
ENGINES = ("local", "native", "horovod")
LOCAL_AGGREGATIONS = ("none", "push", "both")

# Of uint16, int32 and int64.
_LARGEST = {2: 2**16 - 1, 4: 2**31 - 1, 8: 2**63 - 1}

# Parts of 0 to 8 elements are padded to this many, and there are as many
# steps to an octave.
_SMALLEST_CAPACITY = 8


@dataclasses.dataclass(frozen=True)
class TransferBytes:
    """Bytes of one step, by machine. The sum of two is that of both.

    Attributes:
        sent_bytes: tuple of N numbers, one for each machine.
        received_bytes: likewise.
        index_bytes: likewise: what of both are the ids of rows.
    """

    sent_bytes: tuple
    received_bytes: tuple
    index_bytes: tuple

    @property
    def total_bytes(self):
        """Sent and received, by machine."""
        return _add(self.sent_bytes, self.received_bytes)

    @property
    def busiest_machine(self):
        """The machine that the others wait for; the first of several."""
        return self.total_bytes.index(max(self.total_bytes))

    @property
    def busiest_bytes(self):
        """Bytes that the busiest machine sends and receives."""
        return max(self.total_bytes)

    def __add__(self, other):
        if not isinstance(other, TransferBytes):
            return NotImplemented
        if len(self.sent_bytes) != len(other.sent_bytes):
            raise ValueError(
                "Bytes of different clusters do not add up. Received: "
                f"{len(self.sent_bytes)} and {len(other.sent_bytes)} "
                "machines. Compute both for one `Cluster`."
            )
        return TransferBytes(
            _add(self.sent_bytes, other.sent_bytes),
            _add(self.received_bytes, other.received_bytes),
            _add(self.index_bytes, other.index_bytes),
        )


def transfer_bytes(
    variable,
    architecture,
    cluster,
    local_aggregation="none",
    wire_dtype=None,
    index_bytes=8,
    first_machine=0,
):
    """Bytes that one variable costs under one architecture, by machine.

    Sent and received together, with L = 1 and no index bytes (EuroSys Table
    3), of one variable with one partition, at the machine that owns it, and
    of m variables evenly owned (or with partitions on all machines), at each
    machine:

                             one variable        m variables
        dense  "ps"          2 w (N-1)           4 w m (N-1)/N
               "allreduce"   4 w (N-1)/N         4 w m (N-1)/N
        sparse "ps"          2 alpha w (N-1)     4 alpha w m (N-1)/N
               "allgather"   2 alpha w (N-1)     2 alpha w m (N-1)

    In general, with f the share of the variable that a machine owns and S =
    N L processes in a ring that goes through one machine after the other:

        "ps"         sends (1-f) push + (N-1) f pull
                     receives (1-f) pull + (N-1) f push
        "allreduce"  sends and receives 2 w (S-1)/S
        "allgather"  sends and receives (S-1) (alpha w + indices)

    where pull and push are what the workers of one machine pull and push of
    the whole variable: L w bytes, of a sparse one L alpha w; with local
    aggregation w and alpha_machine w. The indices of the rows that are asked
    for, and those of the rows that are pushed, count with push. With local
    aggregation "allreduce" costs what it costs with L = 1.

    Args:
        variable: `VariableSpec`.
        architecture: `"allreduce"`: the whole gradient, summed in a ring, a
            sparse one made dense. `"ps"`: parameter server; a sparse
            variable by rows. `"allgather"`: AllGatherv, the rows of every
            process to every process; of sparse variables only.
        cluster: `Cluster`.
        local_aggregation: what the processes of a machine do together before
            they use the network: `"none"`; `"push"`, they sum their
            gradients, as in the paper; `"both"`, they also pull each row
            once. For "allreduce" both mean the first; "allgather" has none.
        wire_dtype: the dtype that travels, if not the variable's own.
        index_bytes: bytes of a row's index: 4 for int32, 8 for int64, 0 to
            leave indices out.
        first_machine: the machine that has the first partition; the
            following ones go round the machines.

    Returns:
        `TransferBytes`.

    Example:

    >>> table = VariableSpec("table", (1000, 64), alpha=0.02)
    >>> cluster = Cluster(num_machines=4)
    >>> for architecture in ARCHITECTURES:
    ...     cost = transfer_bytes(table, architecture, cluster)
    ...     print(architecture, round(cost.busiest_bytes))
    allreduce 768000
    ps 15840
    allgather 31680

    References:
        EuroSys 3.1 and Table 3; local aggregation: EuroSys 4.3.
    """
    check_is(variable, VariableSpec, "variable")
    check_is(cluster, Cluster, "cluster")
    checks.one_of("architecture", architecture, ARCHITECTURES)
    checks.one_of("local_aggregation", local_aggregation, LOCAL_AGGREGATIONS)
    w = variable.num_bytes()
    if wire_dtype is not None:
        dtype_bytes("wire_dtype", wire_dtype)
        w = variable.num_bytes(wire_dtype)
    checks.check(
        is_number(index_bytes) and 0 <= index_bytes < math.inf,
        "index_bytes",
        index_bytes,
        "a number of bytes: 4 for int32, 8 for int64, 0 for none",
    )
    checks.check(
        isinstance(first_machine, (int, np.integer))
        and not isinstance(first_machine, bool)
        and 0 <= first_machine < cluster.num_machines,
        "first_machine",
        first_machine,
        f"a machine's number, 0 to {cluster.num_machines - 1}",
    )
    if architecture == "allreduce":
        return _all_reduce(w, cluster, local_aggregation)
    if architecture == "allgather":
        checks.check(
            variable.is_sparse,
            "architecture",
            architecture,
            f"'allreduce' or 'ps' for {variable.name!r}: it is dense, and "
            "'allgather' gathers rows. Give a sparse variable its `alpha`",
        )
        return _all_gather(variable, w, index_bytes, cluster)
    shares = _shares(variable, cluster, cluster.num_machines)
    return _parameter_server(
        variable,
        w,
        cluster,
        np.roll(shares, first_machine),
        local_aggregation,
        pull_index_bytes=index_bytes,
        push_index_bytes=index_bytes,
    )


def narrowest_index(num_rows):
    """Bytes of the narrowest integer in which this library sends rows' numbers.

    Of 0 to `num_rows - 1`, and one value that is no row's.

    Example:

    >>> [narrowest_index(n) for n in (50_000, 800_000, 3_000_000_000)]
    [2, 4, 8]
    """
    return next(n for n in (2, 4, 8) if num_rows < _LARGEST[n])


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
    and what the native engine exchanges by rows is padded.

    Args:
        variable: `VariableSpec`.
        architecture: `"allreduce"`, `"ps"` or `"allgather"`.
        cluster: `Cluster`.
        engine: `"native"`, `"horovod"`, or `"local"`, which moves nothing.
        largest_rows: as for `sharded_table_bytes`.
        first_machine: as for `transfer_bytes`, of a dense variable.
        local_aggregation, pulled_bytes: as for `sharded_table_bytes`.

    Returns:
        `TransferBytes`.

    Example:

    >>> table = VariableSpec("table", (1000, 64), alpha=0.02)
    >>> for engine in ENGINES:
    ...     cost = engine_bytes(table, "allgather", Cluster(4), engine)
    ...     print(engine, round(cost.busiest_bytes))
    local 0
    native 30960
    horovod 30960

    References:
        EuroSys 3.1.
    """
    checks.one_of("engine", engine, ENGINES)
    checks.one_of("architecture", architecture, ARCHITECTURES)
    if architecture == "ps" and getattr(variable, "is_sparse", False):
        cost = sharded_table_bytes(
            variable,
            cluster,
            engine == "native",
            largest_rows,
            local_aggregation,
            pulled_bytes,
        )
    else:
        cost = transfer_bytes(
            variable,
            architecture,
            cluster,
            index_bytes=_index_of_all(variable),
            first_machine=first_machine,
        )
    if engine == "local":
        return _on_each(cluster, 0)
    if engine == "native" and architecture == "allgather":
        return _padded_all_gather(variable, cluster)
    return cost


def sharded_table_bytes(
    variable,
    cluster,
    padded=False,
    largest_rows=None,
    local_aggregation=True,
    pulled_bytes=None,
):
    """Bytes that a `ShardedTable` of this library costs, by machine.

    It is a parameter server whose servers are the workers. Each process sends
    the addresses of the unique rows that it needs to their owners, in the
    narrowest integer that holds those of an owner (i bytes), and the rows come
    back. Their gradients, one for each row, follow the ids' way,
    and need no ids of their own. In the words of `transfer_bytes`, "ps" with

        pull = L alpha w
        push = L alpha w + i L alpha num_rows

    With local aggregation, where a machine's processes ask together and add
    their gradients up, alpha_machine takes the place of L alpha. Rows that
    their owner casts or slices before it sends them are pulled in fewer bytes.

    The native engine's operations know even sizes only. What a process sends
    to another one is padded to the largest part that any has for any, and
    this to the next capacity: there are 8 to an octave, so at most 12.5 %
    more. With c(n) the capacity of n elements, n the largest number of rows,
    d their number of elements, and b the bytes of one, a machine sends, and
    receives,

        L (S-L) (i c(n) + 2 b c(n d))

    and with local aggregation, in which each process exchanges with one of
    each other machine, L (N-1) times what is in the last brackets.

    Args:
        variable: `VariableSpec` of a sparse variable, which travels in its
            own dtype.
        cluster: `Cluster`.
        padded: whether parts are padded, as by the native engine; else as by
            Horovod, which sends what there is.
        largest_rows: the largest number of rows that one process asks of one
            owner, if measured; only what is padded depends on it. By default
            that of rows that are touched evenly, and real ids come to more.
        local_aggregation: whether the processes of a machine pull and push
            together, as those of a strategy do by default.
        pulled_bytes: bytes of a row when it is pulled, by default those of
            the whole row in the variable's dtype.

    Returns:
        `TransferBytes`.

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
    checks.check(
        largest_rows is None
        or (is_number(largest_rows) and 0 <= largest_rows < math.inf),
        "largest_rows",
        largest_rows,
        "None or a number of rows",
    )
    checks.check(
        pulled_bytes is None
        or (is_number(pulled_bytes) and 0 <= pulled_bytes < math.inf),
        "pulled_bytes",
        pulled_bytes,
        "None or a number of bytes",
    )
    w = variable.num_bytes()
    most = _shares(variable, cluster, cluster.size).max() * variable.shape[0]
    id_bytes = narrowest_index(math.ceil(most - 1e-9))
    if not padded:
        return _parameter_server(
            variable,
            w,
            cluster,
            _shares(variable, cluster, cluster.num_machines),
            "both" if local_aggregation else "none",
            pull_index_bytes=id_bytes,
            push_index_bytes=0,
            pulled=None
            if pulled_bytes is None
            else pulled_bytes * variable.shape[0],
        )
    local_size = cluster.processes_per_machine
    alpha, others = variable.alpha, cluster.size - local_size
    if local_aggregation:
        alpha, others = _merged(variable, cluster), cluster.num_machines - 1
    if largest_rows is None:
        # Not above the next whole number by a rounding error alone.
        largest_rows = alpha * most - 1e-9
    largest_rows = math.ceil(largest_rows)
    dim = math.prod(variable.shape[1:])
    pairs = local_size * others
    ids = pairs * _capacity(largest_rows) * id_bytes
    element_bytes = dtype_bytes("dtype", variable.dtype)
    rows = pairs * _capacity(largest_rows * dim) * element_bytes
    pulled = 1 if pulled_bytes is None else pulled_bytes / (dim * element_bytes)
    return _on_each(cluster, ids + rows * (1 + pulled), index_bytes=2 * ids)


def _index_of_all(variable):
    is_sparse = getattr(variable, "is_sparse", False)
    return narrowest_index(variable.shape[0]) if is_sparse else 0


def _all_reduce(w, cluster, local_aggregation):
    members = cluster.size
    if local_aggregation != "none":
        members = cluster.num_machines
    return _on_each(cluster, 2 * w * (members - 1) / members)


def _all_gather(variable, w, index_bytes, cluster):
    values = variable.alpha * w
    indices = variable.alpha * variable.shape[0] * index_bytes
    hops = cluster.size - 1
    return _on_each(cluster, hops * (values + indices), 2 * hops * indices)


def _padded_all_gather(variable, cluster):
    num_rows = math.ceil(variable.alpha * variable.shape[0] - 1e-9)
    num_values = num_rows * math.prod(variable.shape[1:])
    element_bytes = dtype_bytes("dtype", variable.dtype)
    hops = cluster.size - 1
    ids = hops * _capacity(num_rows) * _index_of_all(variable)
    values = hops * _capacity(num_values) * element_bytes
    return _on_each(cluster, ids + values, 2 * ids)


def _on_each(cluster, sent_bytes, index_bytes=0):
    """`TransferBytes` where all machines send, and receive, the same."""
    if cluster.num_machines == 1:
        sent_bytes = index_bytes = 0
    sent = (float(sent_bytes),) * cluster.num_machines
    return TransferBytes(
        sent, sent, (float(index_bytes),) * cluster.num_machines
    )


def _parameter_server(
    variable,
    w,
    cluster,
    owned,
    local_aggregation,
    pull_index_bytes,
    push_index_bytes,
    pulled=None,
):
    """`TransferBytes` where machines own shares of a variable.

    Args:
        variable: `VariableSpec`.
        w: bytes of the variable as it travels.
        cluster: `Cluster`.
        owned: array of each machine's share.
        local_aggregation: see `transfer_bytes`.
        pull_index_bytes: bytes of the index with which a row is asked for.
        push_index_bytes: bytes of the index that comes with a gradient.
        pulled: bytes of the variable as it is pulled, by default w.
    """
    alpha, num_rows = 1, 0
    if variable.is_sparse:
        alpha, num_rows = variable.alpha, variable.shape[0]
    # How often each machine moves the whole variable.
    pulls = pushes = cluster.processes_per_machine * alpha
    if local_aggregation != "none":
        pushes = _merged(variable, cluster)
    if local_aggregation == "both":
        pulls = pushes
    asked = pulls * num_rows * pull_index_bytes
    told = pushes * num_rows * push_index_bytes
    # As a worker, of what others own; as an owner, for all other machines.
    as_worker, as_owner = 1 - owned, (cluster.num_machines - 1) * owned
    requests = asked + pushes * w + told
    rows = pulls * (w if pulled is None else pulled)
    return TransferBytes(
        tuple((as_worker * requests + as_owner * rows).tolist()),
        tuple((as_worker * rows + as_owner * requests).tolist()),
        tuple(((as_worker + as_owner) * (asked + told)).tolist()),
    )


def _merged(variable, cluster):
    """alpha_machine, which is 1 for a dense variable."""
    if not variable.is_sparse:
        return 1
    local_size = cluster.processes_per_machine
    # With one worker to a machine, what was measured on machines of several
    # says nothing.
    if local_size == 1 or variable.alpha_machine is None:
        return 1 - (1 - variable.alpha) ** local_size
    most = min(1, local_size * variable.alpha)
    checks.check(
        variable.alpha_machine <= most * (1 + 1e-6),
        "alpha_machine",
        variable.alpha_machine,
        f"at most {most} for {variable.name!r}: {local_size} workers touch "
        f"{variable.alpha} of its rows each. Measure both in one run",
    )
    return variable.alpha_machine


def num_partitions(variable, cluster):
    """P, without empty partitions."""
    count = variable.num_partitions
    if count is None:
        count = cluster.size if variable.is_sparse else 1
    return min(count, variable.shape[0]) if variable.shape else 1


def _shares(variable, cluster, num_owners):
    """Each owner's share of a variable: partitions go round the owners.

    The same for machines and for processes, which take their turns machine
    by machine (EuroSys 3.2).
    """
    count = num_partitions(variable, cluster)
    each, more = divmod(count, num_owners)
    return (each + (np.arange(num_owners) < more)) / count


def _capacity(length):
    """The length to which a part is padded: 8 to an octave."""
    octave = max(0, int(length).bit_length() - 4)
    steps = max(_SMALLEST_CAPACITY, -(-int(length) >> octave))
    return steps << octave


def _add(first, second):
    return tuple(a + b for a, b in zip(first, second, strict=True))
