"""Workers read the same batches, each of which one of them trains on."""

import numpy as np
import pytest

from tests import asynchronous_values as values
from tests.conftest import engines


@pytest.mark.parametrize("num_servers", [0, 1])
def test_workers_that_read_other_batches_are_told(cluster, num_servers):
    ranks = cluster("native", 2, num_servers=num_servers)
    for message in ranks.run(values.read, "permuted"):
        assert "batch 0 (counted from 0) of iteration 1" in message
        assert "rank 1: " in message and "seed the shuffle" in message


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_files_that_come_late_change_no_order(cluster, engine):
    for applied in cluster(engine, 2).run(values.read, "slow files"):
        np.testing.assert_array_equal(applied, 1)
