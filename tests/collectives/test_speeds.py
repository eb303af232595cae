"""Times of messages, on links and at processors."""

import pytest

from keras_sparsity.collectives import speeds


@pytest.mark.parametrize(
    ("whole", "expected"),
    [
        # Two processes' sends and receives of 0.5 s, and of 2 * 1e-4 s a byte.
        ((5.0, 7.0), speeds.Speed(3.0 / 6, 2e-3 - 4e-4)),
        # Processors take all of the time.
        ((1.0, 1.1), speeds.Speed(0.0, 0.0)),
    ],
)
def test_links_have_what_processors_leave(whole, expected):
    processor = speeds.Speed(0.5, 1e-4)
    found = speeds._of_link((1_000, 2_000), whole, processor, 2, others=3)
    assert found.latency_seconds == pytest.approx(expected.latency_seconds)
    assert found.seconds_per_byte == pytest.approx(expected.seconds_per_byte)
