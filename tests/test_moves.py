"""Training goes on, to the bit, while its tables move."""

import numpy as np
import pytest

from tests import move_functions as functions
from tests.conftest import engines

MOVES = {2: (5, 1), 4: (1, 40), 7: (4, 3)}


@pytest.mark.parametrize("engine", engines())
def test_training_goes_on_to_the_bit(cluster, engine):
    results = cluster(engine, 2).run(
        functions.with_and_without, "adagrad", MOVES
    )
    for moved, unmoved in results:
        for one, other in zip(
            [*moved[0], *moved[1]], [*unmoved[0], *unmoved[1]], strict=True
        ):
            np.testing.assert_array_equal(one, other)
        assert moved[2] == unmoved[2]
