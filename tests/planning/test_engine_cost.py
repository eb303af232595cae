"""The bytes of a step of this library: by engine, and counted ones."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pytest

from keras_sparsity import planning
from keras_sparsity.planning import Cluster, VariableSpec
from tests import planning_functions
from tests.conftest import engines
from tests.planning.test_transfer_cost import dense, sparse


def test_what_each_engine_moves():
    cluster = Cluster(4)
    table = sparse(0.095)  # 114 rows, 570 elements
    # 1,254 words of 16 bits, and the next capacity.
    for engine, words in (("native", 1_280), ("horovod", 1_254)):
        plan = planning.plan([dense(), table], cluster, engine=engine)
        on_ring, of_rows = (choice.costs for choice in plan.choices)
        assert set(on_ring) == {"allreduce", "ps"}
        assert of_rows["allgather"].sent_bytes == pytest.approx(
            (3 * words * 2,) * 4
        )
        assert of_rows["ps"] == planning.sharded_table_bytes(
            table, cluster, padded=engine == "native"
        )
        assert of_rows["allreduce"] == on_ring["allreduce"]
    plan = planning.plan([dense(), table], Cluster(), engine="local")
    assert plan.total.busiest_bytes == 0


def on_servers(variable, cluster, engine="horovod", **options):
    cost = planning.engine_bytes(variable, "ps", cluster, engine, **options)
    assert sum(cost.index_bytes) == 0
    return list(zip(cost.sent_bytes, cost.received_bytes, strict=True))


def test_dense_variables_are_summed_in_even_parts():
    # Also of fewer rows than there are processes.
    variable = VariableSpec("bias", (3, 16_000))
    num_bytes = 4 * 48_000
    for num_partitions in (None, 4):
        variable = VariableSpec("bias", (3, 16_000), None, "float32", None)
        for engine in ("horovod", "native"):
            # A worker sends three quarters, and a server its sum to three.
            each = 2 * num_bytes * 3 / 4
            found = on_servers(
                dataclasses.replace(variable, num_partitions=num_partitions),
                Cluster(4),
                engine,
            )
            # The native engine pads 12,000 elements to 12,288.
            each *= 12_288 / 12_000 if engine == "native" else 1
            assert found == [pytest.approx((each, each))] * 4
    # The two processes of each machine sum first, or each for itself.
    for cluster, engine in (
        (Cluster(3, 2), "horovod"),
        (Cluster(3, 2), "native"),
    ):
        padded = 8_192 / 8_000 if engine == "native" else 1
        each = padded * 2 * num_bytes * 2 / 3
        assert (
            on_servers(variable, cluster, engine)
            == [pytest.approx((each, each))] * 3
        )
        assert (
            on_servers(variable, cluster, engine, local_aggregation=False)
            == [pytest.approx((2 * each, 2 * each))] * 3
        )


def test_a_dense_variable_at_one_server():
    variable = VariableSpec("kernel", (100, 100), num_partitions=1)
    num_bytes = 4 * 10_000
    found = on_servers(variable, Cluster(3), first_machine=1)
    assert found == [
        (num_bytes, num_bytes),
        (2 * num_bytes, 2 * num_bytes),
        (num_bytes, num_bytes),
    ]
    # All parts are as long: each sends two others its gradient, and a sum.
    each = 2 * 2 * 4 * 10_240
    assert on_servers(variable, Cluster(3), "native") == [(each, each)] * 3


def test_dense_variables_are_all_reduced_though_servers_send_less():
    cluster = Cluster(2, 2)
    (choice,) = planning.plan([dense()], cluster, engine="horovod").choices
    costs = {name: each.busiest_bytes for name, each in choice.costs.items()}
    assert costs["ps"] < costs["allreduce"]
    assert choice.architecture == "allreduce"
    (choice,) = planning.plan(
        [dense()], cluster, ("ps",), engine="horovod"
    ).choices
    assert choice.architecture == "ps"


def test_padding_is_that_of_the_native_engine():
    table = VariableSpec("table", (10**6, 1), alpha=0.1)
    # 8 to 15, 16 to 30 by 2, 32 to 60 by 4 and so on.
    capacities = [n * 2**octave for octave in range(20) for n in range(8, 16)]
    for length in [*range(300), 1_023, 1_025, 65_537, 100_001]:
        capacity = min(n for n in capacities if n >= length)
        cost = planning.sharded_table_bytes(
            table, Cluster(2), padded=True, largest_rows=length
        )
        assert cost.sent_bytes == (capacity * (4 + 2 * 4),) * 2


def test_rounding_errors_are_not_padded():
    """0.28 times 1,600 comes to a little more than 448."""
    table = VariableSpec("table", (1_600, 1), 0.28)
    cost = planning.sharded_table_bytes(table, Cluster(2), padded=True)
    assert cost.sent_bytes == (224 * (2 + 2 * 4),) * 2


def test_padding_is_to_the_owner_with_most_rows():
    """Three partitions on two machines of one process."""
    table = sparse(0.1, num_partitions=3)
    # Of 120 rows, 80 for rank 0; 80 and 400 elements have capacities.
    rows, elements = 80, 416
    cost = planning.sharded_table_bytes(table, Cluster(2), padded=True)
    assert cost.sent_bytes == (rows * 2 + 2 * elements * 4,) * 2
    # Of four processes each sends to the two on the other machine.
    cost = planning.sharded_table_bytes(
        table, Cluster(2, 2), padded=True, local_aggregation=False
    )
    rows, elements = 40, 208
    assert cost.sent_bytes == (4 * (rows * 2 + 2 * elements * 4),) * 2


@pytest.fixture
def namespace():
    """The name of a network namespace, with a loopback interface of its own.

    Its counters are those of what runs in it alone.
    """
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("a network namespace needs root and the command `ip`")
    name = f"keras-sparsity-{os.getpid()}"
    made = subprocess.run(
        ["ip", "netns", "add", name], capture_output=True, text=True
    )
    if made.returncode != 0:
        pytest.skip(f"no network namespace can be made: {made.stderr}")
    try:
        subprocess.run(
            ["ip", "-n", name, "link", "set", "lo", "up"], check=True
        )
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.mark.parametrize(
    "engine",
    [
        "native",
        pytest.param(
            "horovod",
            marks=[*engines("horovod")[0].marks, pytest.mark.all_cells],
        ),
    ],
)
def test_counted_bytes_are_predicted(engine, namespace):
    program = subprocess.run(
        ["ip", "netns", "exec", namespace, sys.executable]
        + ["-m", planning_functions.__name__, engine],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert program.returncode == 0, program.stdout + program.stderr
    counted = json.loads(program.stdout.splitlines()[-1])

    cluster = Cluster(planning_functions.NUM_PROCESSES)
    shape = (planning_functions.NUM_ROWS, planning_functions.DIM)
    touched = cluster.size * planning_functions.ROWS_OF_EACH_OWNER
    values = VariableSpec("values", (planning_functions.NUM_VALUES,))
    gathered = planning_functions.GATHERED_ROWS / shape[0]
    predicted = {
        name: planning.engine_bytes(variable, architecture, cluster, engine)
        for name, variable, architecture in (
            ("allreduce", values, "allreduce"),
            ("allgather", VariableSpec("rows", shape, gathered), "allgather"),
            ("sharded", VariableSpec("t", shape, touched / shape[0]), "ps"),
        )
    }
    print(counted, predicted)
    for name, cost in predicted.items():
        # What one process sends another leaves through the one interface.
        assert counted[name] == pytest.approx(sum(cost.sent_bytes), rel=0.05)
