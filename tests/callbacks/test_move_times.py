"""Times by which placements are compared."""

import itertools
import types

import pytest

from keras_sparsity.callbacks import move_times


@pytest.mark.parametrize(
    ("cycle_steps", "num_steps", "expected"),
    [
        # Without the two first steps, the lower quartile.
        (1, 14, 1.0),
        (4, 14, 3.0),
        # No whole cycle so far.
        (20, 12, (3 * 9 + 7 * 1) / 10),
    ],
)
def test_steps_between_updates_count_with_them(
    cycle_steps, num_steps, expected, monkeypatch
):
    communicator = types.SimpleNamespace(
        gather_objects=lambda value, name: [value, 0.5]
    )
    # Each fourth step applies an update.
    steps = itertools.islice(itertools.cycle([1.0, 1.0, 1.0, 9.0]), num_steps)
    clock = []
    for now, seconds in enumerate(steps):
        clock += [100.0 * now, 100.0 * now + seconds]
    clock = iter(clock)
    monkeypatch.setattr(
        move_times, "time", types.SimpleNamespace(perf_counter=clock.__next__)
    )
    times = move_times.Measured(communicator)
    times.forget()
    for _ in range(num_steps):
        times.begin()
        times.end(1)
    assert times.step_seconds(cycle_steps) == pytest.approx(expected)
