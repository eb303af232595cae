"""The table of all ways to train a model."""

import pytest

import keras_sparsity as ks
from keras_sparsity.board.strategy_plan import StrategyPlan
from keras_sparsity.stages.measurements import UNMEASURED_RATE


@pytest.mark.parametrize(
    ("rate", "shown"),
    [
        (0.5, "machines of 1, links of 0.5 Mbit/s."),
        (1_000, "machines of 1, links of 1000 Mbit/s."),
        (25_000, "machines of 1, links of 25000 Mbit/s."),
        (UNMEASURED_RATE, "machines of 1, links too fast to measure."),
        (None, "machines of 1. Bytes"),
    ],
)
def test_rates_are_plain_numbers(rate, shown):
    cluster = ks.planning.Cluster(2, megabits_per_second=rate)
    assert shown in StrategyPlan((), cluster, 64).markdown()
