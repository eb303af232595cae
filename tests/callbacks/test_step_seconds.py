"""Seconds of a step: their median, its error and the end of a sample."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.callbacks import step_seconds


def test_median_ignores_outliers():
    steps = [0.010, 0.011, 0.012, 0.010, 0.011, 3.0, 0.011]
    median, error = step_seconds.median_and_error(steps)
    assert median == 0.011
    assert error < 0.001


def test_error_is_the_standard_error_of_a_median():
    rng = np.random.default_rng(0)
    samples = [
        step_seconds.median_and_error(rng.normal(10, 1, 40).tolist())
        for _ in range(400)
    ]
    medians, errors = zip(*samples, strict=True)
    assert np.std(medians) == pytest.approx(np.median(errors), rel=0.2)


def test_logs_of_any_kind_end_a_step():
    """Such as one number for each class, of `F1Score`, and text."""
    end = step_seconds.StepEnd()
    end.on_train_batch_end(0, {"f1_score": np.zeros(3), "state": "new"})
    assert end.seconds > 0


class EqualRanks:
    """Collectives of two ranks whose steps take equally long."""

    def all_gather(self, tensor, name):
        return tf.repeat(tensor, 2, axis=0)


def noisy():
    rng = np.random.default_rng(0)
    return iter(lambda: rng.uniform(0.5, 1.5), None)


SAMPLES = {
    # Name: seconds of a step, options, least and most executions.
    "noisy steps: all of them": (noisy(), {}, 105, 105),
    "steady steps: until the median is known": (
        itertools.repeat(0.5),
        {},
        15,
        20,
    ),
    # A burst of other work is longer than many short steps.
    "short steps: all of them": (itertools.repeat(0.001), {}, 105, 105),
    "no time left: three": (noisy(), {"max_seconds": 1e-9}, 8, 8),
    "the first one traces": (noisy(), {"num_dropped": 0}, 101, 101),
    "whole cycles: four of 25 steps": (
        noisy(),
        {"cycle_steps": 25},
        5 + 4 * 25,
        5 + 4 * 25,
    ),
    "no time left: a cycle, which looks do not end": (
        noisy(),
        {"max_seconds": 1e-9, "cycle_steps": 25},
        5 + 25,
        5 + 25,
    ),
    "executions of 40 steps: the first, then three": (
        noisy(),
        {"steps_per_execution": 40},
        4,
        4,
    ),
}


def test_steps_between_updates_count_with_them():
    sample = step_seconds.StepSeconds(EqualRanks(), 12, 1, 1e9, cycle_steps=4)
    found = [sample.add(s, 1) for s in [50.0, *[1.0, 1.0, 1.0, 9.0] * 3]]
    assert found == [None] * 12 + [(3.0, 0.0)]


def test_no_time_for_a_whole_cycle():
    options = {"cycle_steps": 25, "last_seconds": 1e-9}
    sample = step_seconds.StepSeconds(EqualRanks(), 100, 1, 1e9, **options)
    count = 0
    while not sample.is_late:
        assert sample.add(1.0, 1) is None
        count += 1
    assert count == 1 + 3


@pytest.mark.parametrize(
    ("seconds", "options", "least", "most"), SAMPLES.values(), ids=SAMPLES
)
def test_end_of_a_sample(seconds, options, least, most):
    options = {"num_dropped": 5, "max_seconds": 1e9, **options}
    num_steps = options.pop("steps_per_execution", 1)
    sample = step_seconds.StepSeconds(EqualRanks(), num_steps=100, **options)
    count = 1
    while sample.add(next(seconds) * num_steps, num_steps) is None:
        count += 1
    assert least <= count <= most
