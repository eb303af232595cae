"""The facts on which the bytes of messages depend."""

import types

import pytest

from keras_sparsity.exchange import options
from keras_sparsity.placement import traffic
from keras_sparsity.planning.specs import Cluster, VariableSpec


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ((0,), Cluster(1)),
        ((0, 0, 0, 0), Cluster(4)),  # messages on one machine are not free
        ((0, 0, 1, 1), Cluster(2, 2)),
        ((0, 1, 2, 3), Cluster(4)),
        # The same on all ranks, of which some are alone at their place.
        ((0, 0, 1), Cluster(3)),
        ((0, 0, 0, 0, 1, 1), Cluster(6)),
    ],
)
def test_the_running_cluster(machines, expected):
    communicator = types.SimpleNamespace(size=len(machines), machines=machines)
    assert traffic.running_cluster(communicator) == expected


@pytest.mark.parametrize(
    ("machines", "num_workers", "alpha", "alpha_machine"),
    [
        ((0, 0, 1, 1), 4, 0.4, 0.6),
        # The servers' machine, too.
        ((0, 0, 1, 1), 2, 0.2, 0.3),
        ((0, 1, 0, 1), 2, 0.2, 0.6),
        ((0, 0, 1), 2, 0.4 * 2 / 3, 0.3),
    ],
)
def test_costs_count_servers_as_workers(
    machines, num_workers, alpha, alpha_machine
):
    communicator = types.SimpleNamespace(
        size=len(machines), machines=machines, num_workers=num_workers
    )
    spec = VariableSpec("t", (10, 2), 0.4, alpha_machine=0.6)
    sent = traffic.as_sent(spec, options.Options(), communicator)
    assert sent.alpha == pytest.approx(alpha)
    assert sent.alpha_machine == pytest.approx(alpha_machine)
    dense = VariableSpec("kernel", (10, 2))
    assert traffic.as_sent(dense, options.Options(), communicator) == dense


@pytest.mark.parametrize(
    ("machines", "expected"),
    [
        ((0, 0, 1, 1), [0, 0, 1, 1, 0]),
        ((3, 5, 3, 5), [0, 1, 0, 1, 0]),
        # As many machines of one process.
        ((0, 0, 0), [0, 1, 2, 0, 1]),
        ((0, 0, 1), [0, 1, 2, 0, 1]),
    ],
)
def test_servers_that_take_turns_are_ranks(machines, expected):
    communicator = types.SimpleNamespace(
        size=len(machines), machines=machines, engine="native"
    )
    placements = types.SimpleNamespace(
        communicator=communicator, options=options.Options()
    )
    found = [
        traffic.Traffic.of(object(), placements, number=number).machine
        for number in range(5)
    ]
    assert found == expected
