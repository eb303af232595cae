"""Jobs that train at once in `benchmarks/jobs.py`."""

import argparse

import jobs
import pytest


def test_steps_per_second_while_all_jobs_train():
    # From the second one's begin to the end of the first.
    slow, fast = [0.0, 2.0, 4.0, 6.0], [1.0, 1.5, 2.0, 4.0, 5.0, 9.0]
    assert jobs.together([slow, fast]) == pytest.approx([2 / 4, 4 / 4])


def test_jobs_end_when_each_has_made_enough_steps(tmp_path):
    def rank(job, is_first):
        args = argparse.Namespace(
            folder=str(tmp_path), job=job, num_jobs=2, steps=3
        )
        return jobs.Steps(args, is_first)

    slow, other, fast = rank(0, True), rank(0, False), rank(1, True)
    # Warm-up, steps at the new load, and counted ones.
    enough = jobs.WARM_UP + 2 + 3
    has_ended = False
    for number in range(1, enough + 3):
        assert not slow.done() and not other.done()
        for _ in range(4):
            has_ended = has_ended or fast.done()
        assert has_ended == (number >= enough)
    assert slow.done() and other.done()
