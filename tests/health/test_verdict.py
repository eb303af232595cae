"""What the ranks' reports are taken for."""

import pytest

from keras_sparsity.health.report import Call, Report
from keras_sparsity.health.verdict import (
    describe,
    find_deadlock,
    find_mismatch,
)

A = Call("all_reduce sum", "a", "float32", (3,))
B = Call("all_reduce sum", "b", "float32", (3,))
OTHER_SHAPE = Call("all_reduce sum", "a", "float32", (4,))
SOME_SHAPE = Call("all_reduce sum", "a", "float32", (None,))
FIRST_TWO = Call("all_reduce sum", "machine/a", "float32", (3,), (0, 1))
LAST_TWO = Call("all_reduce sum", "machine/a", "float32", (3,), (2, 3))


def without_shapes(left):
    return tuple((call.without_shape(), times) for call, times in left)


def blocked(*calls, seconds=5.0, upcoming=(), busy=False, left=()):
    return Report(
        "blocked",
        calls,
        tuple(upcoming),
        seconds,
        busy,
        begun=(2,) * len(calls),
        left=without_shapes(left),
    )


def working(seconds=5.0):
    return Report("working", stalled_seconds=seconds)


def ended(seconds=5.0, left=()):
    return Report("ended", stalled_seconds=seconds, left=without_shapes(left))


@pytest.mark.parametrize(
    "reports",
    [
        pytest.param([working(), working()], id="all compute"),
        pytest.param([blocked(A), working(100)], id="one computes"),
        pytest.param([blocked(A), blocked(A)], id="a slow collective"),
        pytest.param([blocked(A), blocked(SOME_SHAPE)], id="a size unknown"),
        pytest.param([blocked(A, B), blocked(A)], id="one of two in common"),
        pytest.param([blocked(A, seconds=1), blocked(B)], id="just begun"),
        pytest.param([blocked(A), ended(0.1)], id="just left by one"),
        pytest.param([working(), ended()], id="ended early, not waited for"),
        pytest.param(
            [blocked(A, upcoming=[B]), blocked(B, upcoming=[A])],
            id="independent calls in another order",
        ),
        pytest.param(
            [
                blocked(A, upcoming=[B], seconds=100, busy=True),
                blocked(B, upcoming=[A], seconds=100),
            ],
            id="computing between two calls",
        ),
        pytest.param(
            [blocked(A), blocked(A), blocked(LAST_TWO), blocked(LAST_TWO)],
            id="a slow collective of a group",
        ),
        pytest.param(
            [ended(), ended(), blocked(LAST_TWO), blocked(LAST_TWO)],
            id="ended, of another group",
        ),
        pytest.param(
            [blocked(A), blocked(A), blocked(B, left=[(A, 2)])],
            id="slow, and one has left it",
        ),
        pytest.param(
            [blocked(A), ended(left=[(A, 2)])],
            id="slow, and one has ended after it",
        ),
    ],
)
def test_ranks_that_may_still_go_on(reports):
    assert find_deadlock(dict(enumerate(reports)), 600) is None


@pytest.mark.parametrize(
    ("reports", "what"),
    [
        ([blocked(A), blocked(B)], "different collectives"),
        ([blocked(A), blocked(OTHER_SHAPE)], "different shapes"),
        ([blocked(A), ended()], "the program of rank 1 has ended"),
        ([ended(), blocked(A), ended()], "the programs of ranks 0, 2 have"),
        ([blocked(A), working(), ended()], "rank 2 has ended"),
        (
            [blocked(A), ended(left=[(A, 2)]), ended()],
            "the program of rank 2 has ended; others wait in a collective for "
            "it.",
        ),
        (
            [
                blocked(A, upcoming=[B], seconds=30),
                blocked(B, upcoming=[A], seconds=30),
            ],
            "different collectives",
        ),
        (
            [blocked(FIRST_TWO), blocked(A), blocked(A), blocked(A)],
            "different collectives",
        ),
        (
            [blocked(A), blocked(A), blocked(B, left=[(A, 1)])],
            "different collectives",
        ),
        ([blocked(A), ended(left=[(A, 1)])], "the program of rank 1 has ended"),
        ([blocked(A, seconds=601), working()], "longer than the timeout"),
        (
            [blocked(A, seconds=601), blocked(B, seconds=601, left=[(A, 2)])],
            "longer than the timeout",
        ),
        ([blocked(A, seconds=601)] * 2, "longer than the timeout"),
    ],
)
def test_ranks_that_wait_for_ever(reports, what):
    assert what in find_deadlock(dict(enumerate(reports)), 600)


def test_the_timeout_counts_from_the_last_rank_that_came():
    reports = {0: blocked(A, seconds=700), 1: blocked(A, seconds=5)}
    assert find_deadlock(reports, 600) is None


def test_mismatch_behind_a_failed_operation_needs_no_waiting():
    reports = {0: blocked(A, seconds=0), 1: blocked(OTHER_SHAPE, seconds=0)}
    assert "different shapes" in find_mismatch(reports)
    assert find_mismatch({0: blocked(A), 1: blocked(A)}) is None
    assert find_mismatch({0: blocked(A), 1: working()}) is None


def test_message_lists_every_rank():
    report = blocked(A, B)
    report.place = "train.py:3 in main"
    message = describe("why.", {0: report, 1: Report("gone"), 2: working()})
    assert message == (
        "keras_sparsity: why.\n"
        "What each rank is doing:\n"
        '  rank 0: waiting 5 s in all_reduce sum "a" of float32 with shape '
        '[3], all_reduce sum "b" of float32 with shape [3] (train.py:3 in '
        "main)\n"
        "  rank 1: gone\n"
        "  rank 2: in no collective"
    )
