"""Pauses of a process are no silence of others."""

from unittest import mock

import pytest

from keras_sparsity.health import pauses


@pytest.mark.parametrize(
    ("seconds", "passed"), [(0.5, 0), (2.5, 0), (4, 4), (700, 700)]
)
def test_a_long_time_between_two_looks_is_a_pause(seconds, passed):
    with mock.patch.object(pauses.time, "monotonic") as clock:
        clock.return_value = 100.0
        found = pauses.Pauses()
        clock.return_value += seconds
        assert found.passed() == passed
        assert found.passed() == 0
