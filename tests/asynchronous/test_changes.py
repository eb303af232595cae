"""Values that callbacks give variables between epochs are trained on."""

import numpy as np
import pytest

from tests import asynchronous_values as values


@pytest.mark.parametrize("num_servers", [0, 1])
@pytest.mark.parametrize(
    "method, ranks",
    [("on_epoch_end", [0, 1, 2]), ("on_epoch_begin", [1])],
)
def test_what_a_callback_assigns_is_kept(cluster, num_servers, method, ranks):
    results = cluster("native", 2, num_servers=num_servers).run(
        values.forgets, method, ranks
    )
    for applied in results:
        np.testing.assert_array_equal(applied, 2)
