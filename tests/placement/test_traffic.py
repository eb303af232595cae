"""The facts on which the bytes of messages depend."""

import types

import pytest

from keras_sparsity.placement import traffic
from keras_sparsity.planning.specs import Cluster


@pytest.mark.parametrize(
    ("num_machines", "of_each", "expected"),
    [
        (1, 1, Cluster(1)),
        (1, 4, Cluster(4)),  # messages on one machine are not free
        (2, 2, Cluster(2, 2)),
        (4, 1, Cluster(4)),
    ],
)
def test_the_running_cluster(num_machines, of_each, expected):
    communicator = types.SimpleNamespace(
        size=num_machines * of_each,
        cross_size=num_machines,
        local_size=of_each,
    )
    assert traffic.running_cluster(communicator) == expected
