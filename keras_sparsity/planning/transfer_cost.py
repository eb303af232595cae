"""Bytes that machines send and receive for a variable in one step."""

import dataclasses
import math

import numpy as np

from keras_sparsity._tf import checks
from keras_sparsity.planning.specs import (
    Cluster,
    VariableSpec,
    check_is,
    dtype_bytes,
)

# Where two cost the same, the earlier is chosen: see `plan`.
ARCHITECTURES = ("allreduce", "ps", "allgather")
LOCAL_AGGREGATIONS = ("none", "push", "both")
_DENSE = ("allreduce", "ps")
PARTITIONED = ("ps",)

# Of uint16, int32 and int64.
_LARGEST = {2: 2**16 - 1, 4: 2**31 - 1, 8: 2**63 - 1}


def architectures_of(variable):
    """The architectures that a variable can have: dense ones gather no rows."""
    if variable.is_sparse:
        return ARCHITECTURES
    return tuple(name for name in ARCHITECTURES if name in _DENSE)


@dataclasses.dataclass(frozen=True)
class TransferBytes:
    """Bytes of one step, by machine. Two of them can be added.

    Args:
        sent_bytes: tuple of N numbers, one for each machine.
        received_bytes: tuple of N numbers.
        index_bytes: tuple of N numbers: bytes of row ids among both.

    Raises:
        ValueError: on adding bytes of clusters of different sizes.

    Example:

    >>> cost = TransferBytes((4, 6), (6, 4), (0, 0))
    >>> (cost + cost).busiest_bytes
    20

    References:
        EuroSys 3.1 and Table 3.
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
        """The first machine with the most bytes, for which all others wait."""
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
    """Bytes of one variable under one architecture, by machine.

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

    where pull and push are the bytes that the workers of one machine pull and
    push of the whole variable: L w, of a sparse one L alpha w; with local
    aggregation w and alpha_machine w. The indices of the rows that are asked
    for, and those of the rows that are pushed, count with push. With local
    aggregation "allreduce" costs as much as with L = 1.

    Args:
        variable: `VariableSpec`.
        architecture: `"allreduce"`: the whole gradient, summed in a ring, a
            sparse one made dense. `"ps"`: parameter server; a sparse
            variable by rows. `"allgather"`: AllGatherv, the rows of every
            process to every process; of sparse variables only.
        cluster: `Cluster`.
        local_aggregation: steps that the processes of a machine take together
            before they use the network: `"none"`; `"push"`, they sum their
            gradients, as in the paper; `"both"`, they also pull each row
            once. For "allreduce" both mean the first; "allgather" has none.
        wire_dtype: the dtype that travels, if not the variable's own.
        index_bytes: bytes of a row's index: 4 for int32, 8 for int64, 0 to
            leave indices out.
        first_machine: the machine of the first partition; the others take
            turns on the following machines.

    Returns:
        `TransferBytes`.

    Raises:
        ValueError: if an argument has another type or value, or a dense
            variable is to be gathered.

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
        checks.is_number(index_bytes) and 0 <= index_bytes < math.inf,
        "index_bytes",
        index_bytes,
        "a number of bytes: 4 for int32, 8 for int64, 0 for none",
    )
    check_first_machine(first_machine, cluster)
    equation = _EQUATIONS[architecture]
    return equation(
        variable, w, cluster, local_aggregation, index_bytes, first_machine
    )


def check_first_machine(first_machine, cluster):
    checks.check(
        checks.is_integer(first_machine)
        and 0 <= first_machine < cluster.num_machines,
        "first_machine",
        first_machine,
        f"a machine's number, 0 to {cluster.num_machines - 1}",
    )


def narrowest_index(num_rows):
    """Bytes of the narrowest integer for `num_rows` row ids and one mark.

    Example:

    >>> [narrowest_index(n) for n in (50_000, 800_000, 3_000_000_000)]
    [2, 4, 8]
    """
    return next(n for n in (2, 4, 8) if num_rows < _LARGEST[n])


def _all_reduce(
    variable, w, cluster, local_aggregation, index_bytes, first_machine
):
    del variable, index_bytes, first_machine
    members = cluster.size
    if local_aggregation != "none":
        members = cluster.num_machines
    return on_each(cluster, 2 * w * (members - 1) / members)


def _all_gather(
    variable, w, cluster, local_aggregation, index_bytes, first_machine
):
    del local_aggregation, first_machine
    checks.check(
        variable.is_sparse,
        "architecture",
        "allgather",
        f"'allreduce' or 'ps' for {variable.name!r}: it is dense, and "
        "'allgather' gathers rows. Give a sparse variable its `alpha`",
    )
    values = variable.alpha * w
    indices = variable.alpha * variable.shape[0] * index_bytes
    hops = cluster.size - 1
    return on_each(cluster, hops * (values + indices), 2 * hops * indices)


def _servers(
    variable, w, cluster, local_aggregation, index_bytes, first_machine
):
    owned = shares(variable, cluster, cluster.num_machines)
    return parameter_server(
        variable,
        w,
        cluster,
        np.roll(owned, first_machine),
        local_aggregation,
        pull_index_bytes=index_bytes,
        push_index_bytes=index_bytes,
    )


def on_each(cluster, sent_bytes, index_bytes=0):
    """`TransferBytes` where all machines send, and receive, the same."""
    if cluster.num_machines == 1:
        sent_bytes = index_bytes = 0
    sent = (float(sent_bytes),) * cluster.num_machines
    return TransferBytes(
        sent, sent, (float(index_bytes),) * cluster.num_machines
    )


def parameter_server(
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
        pushes = merged(variable, cluster)
    if local_aggregation == "both":
        pulls = pushes
    asked = pulls * num_rows * pull_index_bytes
    told = pushes * num_rows * push_index_bytes
    # As a worker, of the shares of others; as an owner, for all others.
    as_worker, as_owner = 1 - owned, (cluster.num_machines - 1) * owned
    requests = asked + pushes * w + told
    rows = pulls * (w if pulled is None else pulled)
    return TransferBytes(
        tuple((as_worker * requests + as_owner * rows).tolist()),
        tuple((as_worker * rows + as_owner * requests).tolist()),
        tuple(((as_worker + as_owner) * (asked + told)).tolist()),
    )


def merged(variable, cluster):
    """alpha_machine, which is 1 for a dense variable."""
    if not variable.is_sparse:
        return 1
    local_size = cluster.processes_per_machine
    # With one worker to a machine, a measurement on machines of several
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


def shares(variable, cluster, num_owners):
    """Each owner's share of a variable: partitions go round the owners.

    The same for machines and for processes, which take their turns machine
    by machine (EuroSys 3.2).
    """
    count = num_partitions(variable, cluster)
    each, more = divmod(count, num_owners)
    return (each + (np.arange(num_owners) < more)) / count


def _add(first, second):
    return tuple(a + b for a, b in zip(first, second, strict=True))


# The paper's equations.
_EQUATIONS = {
    "allreduce": _all_reduce,
    "ps": _servers,
    "allgather": _all_gather,
}
