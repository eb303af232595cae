"""Times of messages, on links and at processors."""

import pytest

from keras_sparsity.collectives import speeds
from keras_sparsity.collectives.speeds import Speed


@pytest.mark.parametrize(
    ("whole", "link", "processor"),
    [
        # Two processes' sends and receives of 0.5 s, and of 2 * 1e-4 s a byte.
        (Speed(5.0, 2e-3), Speed(3.0 / 6, 2e-3 - 4e-4), Speed(0.5, 1e-4)),
        # Processors take all of the time, and work at once.
        (Speed(1.0, 1e-4), Speed(0.0, 0.0), Speed(0.25, 2.5e-5)),
    ],
)
def test_links_have_what_processors_leave(whole, link, processor):
    measured = Speed(0.5, 1e-4)
    found = speeds._divided(whole, measured, num_sharing=2, others=3)
    for speed, expected in zip(found, (link, processor), strict=True):
        assert speed.latency_seconds == pytest.approx(expected.latency_seconds)
        assert speed.seconds_per_byte == pytest.approx(
            expected.seconds_per_byte
        )
