"""The bytes of a step: by the paper's Table 3, and as simulated."""

import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from keras_sparsity import planning
from keras_sparsity.planning import Cluster, VariableSpec, transfer_cost

ROWS, DIM = 1200, 5
ALPHA = 0.1
W = ROWS * DIM * 4
M = 12


def dense(**options):
    return VariableSpec("kernel", (ROWS, DIM), **options)


def sparse(alpha=ALPHA, **options):
    return VariableSpec("table", (ROWS, DIM), alpha=alpha, **options)


def evenly_owned(variable, architecture, num_machines):
    """M variables, each with its one owner: bytes by machine."""
    cluster = Cluster(num_machines)
    costs = [
        planning.transfer_bytes(
            variable,
            architecture,
            cluster,
            index_bytes=0,
            first_machine=i % num_machines,
        )
        for i in range(M)
    ]
    return sum(costs[1:], costs[0]).total_bytes


# EuroSys Table 3: of one variable (at the machine that has most), and of M.
TABLE_3 = {
    ("dense", "ps"): (
        lambda N: 2 * W * (N - 1),
        lambda N: 4 * W * M * (N - 1) / N,
    ),
    ("dense", "allreduce"): (
        lambda N: 4 * W * (N - 1) / N,
        lambda N: 4 * W * M * (N - 1) / N,
    ),
    ("sparse", "ps"): (
        lambda N: 2 * ALPHA * W * (N - 1),
        lambda N: 4 * ALPHA * W * M * (N - 1) / N,
    ),
    ("sparse", "allgather"): (
        lambda N: 2 * ALPHA * W * (N - 1),
        lambda N: 2 * ALPHA * W * M * (N - 1),
    ),
}
SPECS = {
    "dense": dense(num_partitions=1),
    "sparse": sparse(num_partitions=1),
}


@pytest.mark.parametrize("num_machines", [1, 2, 3, 4, 12])  # divisors of M
@pytest.mark.parametrize(("kind", "architecture"), TABLE_3)
def test_table_3(kind, architecture, num_machines):
    one, many = TABLE_3[kind, architecture]
    cost = planning.transfer_bytes(
        SPECS[kind], architecture, Cluster(num_machines), index_bytes=0
    )
    assert cost.busiest_machine == 0
    assert cost.busiest_bytes == pytest.approx(one(num_machines))
    assert evenly_owned(SPECS[kind], architecture, num_machines) == (
        pytest.approx([many(num_machines)] * num_machines)
    )


@pytest.mark.parametrize("num_machines", [2, 3, 8])
def test_partitions_on_all_machines_are_evenly_owned(num_machines):
    cost = planning.transfer_bytes(
        sparse(), "ps", Cluster(num_machines), index_bytes=0
    )
    expected = 4 * ALPHA * W * (num_machines - 1) / num_machines
    assert cost.total_bytes == pytest.approx([expected] * num_machines)


# Every message of a step, one by one.


def simulated(architecture, variable, cluster, aggregation, index_bytes):
    """`(N, N)`: bytes from machine to machine, and those of indices."""
    N, L = cluster.num_machines, cluster.processes_per_machine
    size = N * L
    values, ids = np.zeros((N, N)), np.zeros((N, N))
    w = variable.num_elements * 4
    alpha = variable.alpha if variable.is_sparse else 1
    if architecture in ("allreduce", "allgather"):
        merged = architecture == "allreduce" and aggregation != "none"
        ring = list(range(0, size, L)) if merged else list(range(size))
        for rank, after in zip(ring, ring[1:] + ring[:1], strict=True):
            edge = rank // L, after // L
            if architecture == "allreduce":
                # Reduce-scatter, then all-gather, of one chunk in each round.
                values[edge] += 2 * (len(ring) - 1) * w / len(ring)
            else:
                # Each round passes on the rows of another process.
                values[edge] += (size - 1) * alpha * w
                ids[edge] += (size - 1) * alpha * ROWS * index_bytes
        np.fill_diagonal(values, 0)
        np.fill_diagonal(ids, 0)
        return values, ids
    count = variable.num_partitions or (size if variable.is_sparse else 1)
    together = 1.0
    if variable.is_sparse:
        untouched = np.prod([1 - alpha] * L)
        together = variable.alpha_machine or 1 - untouched
    for machine, partition in itertools.product(range(N), range(count)):
        owner = partition % N
        if owner == machine:
            continue
        for is_push in (False, True):
            merges = aggregation == "both" or aggregation == "push" and is_push
            messages = [together] if merges else [alpha] * L
            for touched in messages:
                way = (machine, owner) if is_push else (owner, machine)
                values[way] += touched * w / count
                if variable.is_sparse and (
                    is_push is False or architecture == "ps"
                ):
                    ids[machine, owner] += touched * ROWS / count * index_bytes
    return values, ids


clusters = strategies.builds(
    Cluster, strategies.integers(1, 6), strategies.integers(1, 4)
)
fractions = strategies.floats(0.001, 1)
partitions = strategies.none() | strategies.integers(1, 30)
aggregations = strategies.sampled_from(transfer_cost.LOCAL_AGGREGATIONS)


def properties(test):
    return hypothesis.settings(deadline=None, database=None, max_examples=60)(
        test
    )


@properties
@hypothesis.given(
    cluster=clusters,
    alpha=strategies.none() | fractions,
    num_partitions=partitions,
    aggregation=aggregations,
    index_bytes=strategies.sampled_from([0, 4, 8]),
)
def test_every_architecture_as_simulated(
    cluster, alpha, num_partitions, aggregation, index_bytes
):
    variable = sparse(alpha, num_partitions=num_partitions)
    known = set(transfer_cost.ARCHITECTURES)
    for architecture in known if variable.is_sparse else known - {"allgather"}:
        cost = planning.transfer_bytes(
            variable, architecture, cluster, aggregation, None, index_bytes
        )
        values, ids = simulated(
            architecture, variable, cluster, aggregation, index_bytes
        )
        compare(cost, values, ids)
    if variable.is_sparse:
        for together in (False, True):
            cost = planning.sharded_table_bytes(
                variable, cluster, local_aggregation=together
            )
            aggregation = "both" if together else "none"
            compare(
                cost, *simulated("sharded", variable, cluster, aggregation, 2)
            )


def compare(cost, values, ids):
    both = values + ids
    assert cost.sent_bytes == pytest.approx(both.sum(1))
    assert cost.received_bytes == pytest.approx(both.sum(0))
    assert cost.index_bytes == pytest.approx(ids.sum(1) + ids.sum(0))


@properties
@hypothesis.given(
    cluster=clusters, num_partitions=partitions, aggregation=aggregations
)
def test_alpha_of_one_is_dense(cluster, num_partitions, aggregation):
    whole, rows = (
        planning.transfer_bytes(
            variable, "ps", cluster, aggregation, index_bytes=0
        )
        for variable in (
            dense(num_partitions=num_partitions or cluster.size),
            sparse(1, num_partitions=num_partitions),
        )
    )
    assert rows.sent_bytes == pytest.approx(whole.sent_bytes)
    assert rows.received_bytes == pytest.approx(whole.received_bytes)


@properties
@hypothesis.given(cluster=clusters, alpha=fractions, num_partitions=partitions)
def test_local_aggregation_saves(cluster, alpha, num_partitions):
    none, push, both = (
        planning.transfer_bytes(
            sparse(alpha, num_partitions=num_partitions),
            "ps",
            cluster,
            aggregation,
        ).busiest_bytes
        for aggregation in transfer_cost.LOCAL_AGGREGATIONS
    )
    if cluster.processes_per_machine == 1 or cluster.num_machines == 1:
        assert none == pytest.approx(push) == pytest.approx(both)
    else:
        assert none > push > both


def test_one_machine_sends_nothing():
    cluster = Cluster(1, processes_per_machine=4)
    choices = planning.plan([dense(), sparse()], cluster).choices
    costs = [cost for choice in choices for cost in choice.costs.values()]
    costs += [
        planning.sharded_table_bytes(sparse(), cluster, padded=padded)
        for padded in (False, True)
    ]
    assert len(costs) == 2 + 3 + 2
    assert all(cost.busiest_bytes == 0 for cost in costs)
    assert [c.architecture for c in choices] == ["allreduce", "allreduce"]


def test_measured_alpha_of_the_machine():
    """Popular rows are the same for all four workers."""
    cluster = Cluster(3, 4)
    cost = planning.transfer_bytes(
        sparse(alpha_machine=0.15), "ps", cluster, "push", index_bytes=0
    )
    share = 4 * (3 - 1) / 3 * W / 2
    assert cost.busiest_bytes == pytest.approx(share * (4 * ALPHA + 0.15))
    alone = planning.transfer_bytes(sparse(), "ps", Cluster(3), "push")
    assert alone == planning.transfer_bytes(
        sparse(alpha_machine=0.15), "ps", Cluster(3), "push"
    )
    with pytest.raises(ValueError, match="at most 0.2 for 'table'"):
        planning.transfer_bytes(
            sparse(alpha_machine=0.25), "ps", Cluster(3, 2), "push"
        )


def test_wire_dtype():
    for architecture in transfer_cost.ARCHITECTURES:
        full, half = (
            planning.transfer_bytes(
                sparse(), architecture, Cluster(4), "none", dtype, 4
            )
            for dtype in (None, "bfloat16")
        )
        assert half.index_bytes == full.index_bytes
        assert half.busiest_bytes == pytest.approx(
            (full.busiest_bytes + full.index_bytes[0]) / 2
        )


def test_empty_partitions_own_nothing():
    few, many = (
        planning.transfer_bytes(
            VariableSpec("table", (3, 5), 0.5, num_partitions=count),
            "ps",
            Cluster(2),
        )
        for count in (3, 30)
    )
    assert few == many


def test_bytes_of_different_clusters_do_not_add_up():
    costs = [planning.transfer_bytes(dense(), "ps", Cluster(n)) for n in (2, 3)]
    with pytest.raises(ValueError, match="2 and 3 machines.*one `Cluster`"):
        costs[0] + costs[1]
