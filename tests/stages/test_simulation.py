"""Times of a simulated run, against formulas and a run worked out by hand."""

import pytest

from keras_sparsity.stages.schedule import (
    Kind,
    Schedule,
    Task,
    gpipe,
    one_forward_one_backward,
    without_flush,
)
from keras_sparsity.stages.simulation import _Processor, simulate


def _task(letter, batch):
    return Task({"f": Kind.FORWARD, "b": Kind.BACKWARD}[letter], batch)


@pytest.mark.parametrize("num_batches", [1, 4, 16])
@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("make", [gpipe, one_forward_one_backward])
def test_the_slots_of_a_flush(make, num_stages, num_batches):
    timeline = simulate(make(num_stages, num_batches))
    assert timeline.seconds == 2 * (num_batches + num_stages - 1)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
def test_the_slots_without_a_flush(num_stages):
    timeline = simulate(without_flush(num_stages, 40))
    for stage in range(num_stages):
        for batch in range(num_stages, 40):
            starts = timeline.starts[stage]
            assert starts[_task("f", batch)] == 2 * batch + stage
            assert starts[_task("b", batch)] == (
                2 * batch + 2 * num_stages - 1 - stage
            )


@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
def test_the_slots_of_turns_with_messages_ahead(num_stages):
    """Turns of two slots: forward passes in the first, backward behind."""
    num_batches = 4 * num_stages + 40
    timeline = simulate(without_flush(num_stages, num_batches, True))
    for stage in range(num_stages):
        starts, behind = timeline.starts[stage], num_stages - 1 - stage
        for batch in range(num_batches):
            backward = batch + 2 * stage + 4 * behind
            assert starts[_task("b", batch)] == 2 * backward + 1
            # While the pipeline fills, as soon as messages come.
            if batch > 4 * behind:
                assert starts[_task("f", batch)] == 2 * (batch + 2 * stage)


def test_messages_travel_while_stages_compute_and_wait_for_their_link():
    # Forward passes of 1 and 2 seconds, backward of 3 and 1; an activation
    # travels for 4 seconds, longer than it takes to make the next one.
    timeline = simulate(gpipe(2, 2), [1, 2], [3, 1], [4], [0.5])
    first, second = timeline.starts
    assert first[_task("f", 1)] == 1
    assert second[_task("f", 0)] == 5  # 1 + 4
    assert second[_task("f", 1)] == 9  # the link is free at 5; 5 + 4
    assert second[_task("b", 0)] == 11
    assert second[_task("b", 1)] == 12
    assert first[_task("b", 0)] == 12.5
    assert first[_task("b", 1)] == 15.5  # its gradient has been there: 13.5
    assert timeline.seconds == 18.5
    busy = [
        sum(ends[task] - starts[task] for task in starts)
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
    ]
    assert busy == [8, 6]


def test_stages_that_share_a_processor_run_at_once():
    timeline = simulate(gpipe(2, 2), [1, 2], [3, 1], processors=[0, 0])
    first, second = timeline.starts
    assert first[_task("f", 0)] == 0
    # Each at half of the speed.
    assert first[_task("f", 1)] == second[_task("f", 0)] == 1
    assert timeline.ends[0][_task("f", 1)] == 3
    assert second[_task("f", 1)] == 4
    assert second[_task("b", 0)] == 6
    # At once again.
    assert first[_task("b", 0)] == second[_task("b", 1)] == 7
    assert timeline.ends[1][_task("b", 1)] == 9
    assert first[_task("b", 1)] == 11
    assert timeline.seconds == 14  # always busy


def test_a_processor_of_three_stages():
    """Passes of 3, 2 and 1 that begin together, and one that comes later."""
    processor = _Processor()
    for stage, seconds in enumerate([3, 2, 1]):
        processor.start(stage, seconds, 0)
    assert processor.next_end() == (3, 2)
    processor.start(3, 1, 1.5)  # half of stage 2's is left
    assert processor.next_end() == (3.5, 2)
    processor.end(2, 3.5)
    assert processor.next_end() == (5, 3)
    processor.end(3, 5)
    assert processor.next_end() == (6, 1)
    processor.end(1, 6)
    assert processor.next_end() == (7, 0)
    processor.end(0, 7)
    assert processor.next_end() is None


def test_a_schedule_that_deadlocks_names_the_waiting_tasks():
    tasks = (_task("f", 0), _task("b", 0), _task("f", 1), _task("b", 1))
    swapped = (_task("f", 1), _task("f", 0), _task("b", 0), _task("b", 1))
    with pytest.raises(ValueError, match="for ever") as raised:
        simulate(Schedule(2, (tasks, swapped)))
    lines = str(raised.value).splitlines()
    assert lines[1:3] == [
        "  stage 0, backward pass of batch 0, waits for "
        "stage 1, backward pass of batch 0",
        "  stage 1, forward pass of batch 1, waits for "
        "stage 0, forward pass of batch 1",
    ]


def test_a_backward_pass_before_its_forward_pass_is_a_deadlock():
    with pytest.raises(ValueError, match="waits for stage 0, forward"):
        simulate(Schedule(1, ((_task("b", 0), _task("f", 0)),)))


def test_thousands_of_stages_take_no_recursion():
    assert simulate(one_forward_one_backward(2000, 4)).seconds == 2 * 2003
