"""A model's variables at servers."""

import numpy as np
import pytest

from tests import asynchronous_losses
from tests.conftest import engines


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_large_variables_travel_in_blocks(cluster, engine):
    """A message has at most 2 GiB."""
    ranks = cluster(engine, 2, num_servers=2)
    for updates, *_ in ranks.run(asynchronous_losses.in_blocks):
        np.testing.assert_array_equal(updates, 3)
