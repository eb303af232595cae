"""The updates between a pass and the weights that it should have, counted."""

import pytest

from keras_sparsity.stages.schedule import Kind, Task, without_flush
from keras_sparsity.stages.turns import Turns

_NUM_BATCHES = 80


def _slots(num_stages, stage, messages_ahead):
    """The slots of mini-batch 0: forward, backward.

    Forward of m at stage k in slot 2m + k, backward and update in
    2m + 2N - 1 - k, as the paper's figure 2 draws it. With messages ahead in
    turns of two slots.
    """
    if messages_ahead:
        behind = num_stages - 1 - stage
        return 4 * stage, 2 * (2 * stage + 4 * behind) + 1
    return stage, 2 * num_stages - 1 - stage


@pytest.mark.parametrize("messages_ahead", [False, True])
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_distances_once_the_pipeline_is_full(num_stages, messages_ahead):
    """Of other batches' updates, until the pass's own is at stage 0 again."""
    turns = Turns(num_stages, messages_ahead)
    _, returned = _slots(num_stages, 0, messages_ahead)
    for stage in range(num_stages):
        forward, back = _slots(num_stages, stage, messages_ahead)
        for batch in range(30, 45):
            to_return = [
                sum(
                    2 * batch + own < 2 * other + back <= 2 * batch + returned
                    for other in range(_NUM_BATCHES)
                    if other != batch
                )
                for own in (forward, back)
            ]
            beyond = turns.num_beyond(stage)
            assert to_return == [turns.num_ahead(stage) + beyond, beyond]


@pytest.mark.parametrize("messages_ahead", [False, True])
@pytest.mark.parametrize("num_stages", range(1, 9))
def test_updates_that_a_forward_pass_misses(num_stages, messages_ahead):
    turns = Turns(num_stages, messages_ahead)
    schedule = without_flush(num_stages, _NUM_BATCHES, messages_ahead)
    for stage, tasks in enumerate(schedule.stages):
        for batch in range(_NUM_BATCHES):
            later = tasks[tasks.index(Task(Kind.FORWARD, batch)) :]
            missed = sum(
                task.kind is Kind.UPDATE and task.batch < batch
                for task in later
            )
            assert missed == min(batch, turns.num_ahead(stage))


@pytest.mark.parametrize(
    ("messages_ahead", "stage", "ahead", "beyond"),
    [(False, 0, 3, 0), (False, 3, 0, 1), (True, 0, 12, 0), (True, 3, 0, 6)],
)
def test_of_four_stages(messages_ahead, stage, ahead, beyond):
    turns = Turns(4, messages_ahead)
    assert turns.num_ahead(stage) == ahead
    assert turns.num_beyond(stage) == beyond
