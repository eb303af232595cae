"""Each stage runs each pass once, in an order that holds few activations."""

import pytest

from keras_sparsity.stages.schedule import (
    Kind,
    gpipe,
    one_forward_one_backward,
    without_flush,
)

_SIZES = [(1, 1), (1, 5), (2, 1), (3, 2), (4, 9), (8, 40)]


def _spelled(tasks):
    letters = {Kind.FORWARD: "f", Kind.BACKWARD: "b", Kind.UPDATE: "u"}
    return " ".join(f"{letters[task.kind]}{task.batch}" for task in tasks)


@pytest.mark.parametrize(
    ("make", "stages"),
    [
        (gpipe, ["f0 f1 f2 b0 b1 b2 u2"] * 3),
        (
            one_forward_one_backward,
            [
                "f0 f1 f2 b0 b1 b2 u2",
                "f0 f1 b0 f2 b1 b2 u2",
                "f0 b0 f1 b1 f2 b2 u2",
            ],
        ),
        (
            without_flush,
            [
                "f0 f1 f2 b0 u0 b1 u1 b2 u2",
                "f0 f1 b0 u0 f2 b1 u1 b2 u2",
                "f0 b0 u0 f1 b1 u1 f2 b2 u2",
            ],
        ),
    ],
)
def test_three_stages_and_three_batches(make, stages):
    schedule = make(3, 3)
    assert [_spelled(tasks) for tasks in schedule.stages] == stages


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize(
    "make", [gpipe, one_forward_one_backward, without_flush]
)
def test_each_pass_is_run_once_and_in_the_order_of_batches(make, size):
    num_stages, num_batches = size
    schedule = make(num_stages, num_batches)
    assert schedule.num_stages == num_stages
    for tasks in schedule.stages:
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            batches = [task.batch for task in tasks if task.kind is kind]
            assert batches == list(range(num_batches))


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize(
    ("make", "held"),
    [
        (gpipe, lambda n, k, m: m),
        (one_forward_one_backward, lambda n, k, m: min(n - k, m)),
        (without_flush, lambda n, k, m: min(n - k, m)),
        (
            lambda n, m: without_flush(n, m, messages_ahead=True),
            lambda n, k, m: min(4 * (n - 1 - k) + 1, m),
        ),
    ],
)
def test_activations_that_a_stage_holds(make, held, size):
    num_stages, num_batches = size
    schedule = make(num_stages, num_batches)
    assert [schedule.in_flight(stage) for stage in range(num_stages)] == [
        held(num_stages, stage, num_batches) for stage in range(num_stages)
    ]
