"""The choice of the architecture with the fewest bytes."""

import pytest

from keras_sparsity import planning
from keras_sparsity.planning import Cluster, VariableSpec
from tests.planning.test_transfer_cost import ALPHA, SPECS, M, W, dense, sparse


@pytest.mark.parametrize(
    ("variable", "num_machines", "expected"),
    [
        (dense(), 2, "allreduce"),
        (dense(), 8, "allreduce"),
        (sparse(0.01), 8, "ps"),
        (sparse(0.01), 2, "ps"),
        # With its index, 8 bytes, a row of 20 travels as 28.
        (sparse(0.71), 8, "ps"),
        (sparse(0.72), 8, "allreduce"),
        (sparse(1.0), 8, "allreduce"),
        # 2 alpha w (N-1) at the one owner.
        (sparse(0.5, num_partitions=1), 8, "allreduce"),
    ],
)
def test_the_fewest_bytes_are_chosen(variable, num_machines, expected):
    (choice,) = planning.plan([variable], Cluster(num_machines)).choices
    assert choice.architecture == expected
    gathered = {"allgather"} if variable.is_sparse else set()
    assert choice.costs.keys() == {"allreduce", "ps"} | gathered


@pytest.mark.parametrize(
    ("alpha", "expected"), [(0.01, "allgather"), (0.9, "allreduce")]
)
def test_without_servers(alpha, expected):
    (choice,) = planning.plan(
        [sparse(alpha)], Cluster(4), ("allgather", "allreduce")
    ).choices
    assert choice.architecture == expected


def test_equal_costs_are_not_told_apart_by_rounding():
    for num_machines in range(2, 40):
        variable = dense(num_partitions=num_machines)
        (choice,) = planning.plan([variable], Cluster(num_machines)).choices
        assert choice.architecture == "allreduce", num_machines


def test_hybrid_architecture_of_table_3():
    """Dense variables by AllReduce and sparse ones on servers, M of each."""
    N = 4
    hybrid = planning.plan(
        [SPECS["dense"], SPECS["sparse"]] * M, Cluster(N), index_bytes=0
    )
    chosen = [choice.architecture for choice in hybrid.choices]
    # With one owner each, a table costs 2 alpha w (N-1) either way.
    assert chosen == ["allreduce", "ps"] * M
    assert hybrid.total.total_bytes == pytest.approx(
        [4 * (1 + ALPHA) * W * M * (N - 1) / N] * N
    )


def test_plan_spreads_variables_over_machines():
    servers = planning.plan([dense()] * 6, Cluster(3), ("ps",))
    assert servers.total.total_bytes == pytest.approx([16 * W] * 3)


def test_alpha_model_is_weighted_by_size():
    variables = [
        VariableSpec("kernel", (10, 10)),
        VariableSpec("bias", ()),
        VariableSpec("table", (99, 9, 1), alpha=0.5),
    ]
    expected = (100 + 1 + 0.5 * 891) / (100 + 1 + 891)
    assert planning.alpha_model(variables) == pytest.approx(expected)
    plan = planning.plan(variables, Cluster(2))
    assert plan.alpha_model == pytest.approx(expected)
