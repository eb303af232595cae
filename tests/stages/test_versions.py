"""The updates between a pass and the weights that it should have, counted."""

import pytest

from keras_sparsity.stages import versions
from keras_sparsity.stages.schedule import (
    Kind,
    Task,
    gpipe,
    one_forward_one_backward,
    without_flush,
)

_NUM_BATCHES = 40


def _slots(num_stages, stage, messages_ahead):
    """The slots of mini-batch 0: forward, backward."""
    if messages_ahead:
        behind = num_stages - 1 - stage
        return 4 * stage, 2 * (2 * stage + 4 * behind) + 1
    return stage, 2 * num_stages - 1 - stage


def _by_slots(num_stages, stage, kind, batch, messages_ahead, counts):
    """The updates that come after a pass and that `counts(slot, batch)`.

    Forward of m at stage k in slot 2m + k, backward and update in
    2m + 2N - 1 - k, as the paper's figure 2 draws it. With messages ahead in
    turns of two slots.
    """
    first, back = _slots(num_stages, stage, messages_ahead)
    own = 2 * batch + (first if kind is Kind.FORWARD else back)
    return sum(
        counts(2 * other + back, other)
        for other in range(_NUM_BATCHES)
        if other != batch and 2 * other + back > own
    )


@pytest.mark.parametrize("messages_ahead", [False, True])
@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("kind", [Kind.FORWARD, Kind.BACKWARD])
def test_every_pass_while_the_pipeline_fills_runs_and_drains(
    kind, num_stages, messages_ahead
):
    schedule = without_flush(num_stages, _NUM_BATCHES, messages_ahead)
    _, returned = _slots(num_stages, 0, messages_ahead)
    for stage in range(num_stages):
        to_return = versions.updates_to_return(schedule, stage)
        missed = versions.missed_updates(schedule, stage)
        for batch in range(_NUM_BATCHES):
            end = 2 * batch + returned
            task = Task(kind, batch)
            place = num_stages, stage, kind, batch, messages_ahead
            assert to_return[task] == _by_slots(
                *place, lambda slot, _, end=end: slot <= end
            )
            assert missed[task] == _by_slots(
                *place, lambda _, other, batch=batch: other < batch
            )


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_equations_5_and_6_in_the_steady_state(num_stages):
    schedule = without_flush(num_stages, _NUM_BATCHES)
    for stage in range(num_stages):
        to_return = versions.updates_to_return(schedule, stage)
        missed = versions.missed_updates(schedule, stage)
        for batch in range(10, 30):
            forward = Task(Kind.FORWARD, batch)
            backward = Task(Kind.BACKWARD, batch)
            assert to_return[forward] == stage // 2 + num_stages - stage - 1
            assert to_return[backward] == stage // 2
            assert missed[forward] == num_stages - 1 - stage
            assert missed[backward] == 0


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_messages_ahead_in_the_steady_state(num_stages):
    schedule = without_flush(num_stages, 80, messages_ahead=True)
    for stage in range(num_stages):
        behind = num_stages - 1 - stage
        to_return = versions.updates_to_return(schedule, stage)
        missed = versions.missed_updates(schedule, stage)
        for batch in range(30, 45):
            forward = Task(Kind.FORWARD, batch)
            backward = Task(Kind.BACKWARD, batch)
            assert to_return[forward] == 2 * stage + 4 * behind
            assert to_return[backward] == 2 * stage
            assert missed[forward] == 4 * behind
            assert missed[backward] == 0


@pytest.mark.parametrize("make", [gpipe, one_forward_one_backward])
def test_a_flush_misses_nothing(make):
    schedule = make(4, 6)
    for stage in range(4):
        missed = versions.missed_updates(schedule, stage)
        assert len(missed) == 12
        assert set(missed.values()) == {0}
