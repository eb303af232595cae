"""Costs of pipelines whose stages have different numbers of ranks.

The chain of `test_strategy_costs.py`, and numbers worked out by hand.
"""

import pytest

from keras_sparsity.board.strategy_plan import StrategyPlan
from keras_sparsity.planning import Cluster
from keras_sparsity.stages.profile import GradientSize
from keras_sparsity.stages.stage_links import StageLink, pieces
from keras_sparsity.stages.strategy_costs import strategy_costs
from tests.stages.test_strategy_costs import (
    EXAMPLES,
    NARROW,
    RATE,
    SIZES,
    facts,
)

# Behind "b", one rank and two are the best.
LAST_IS_SLOW = (3.0, 1.0, 8.0)
FRONT, BACK = 4_400, 40_000  # bytes of weights


def of_two_stages(cluster, num_examples=EXAMPLES, **changes):
    """Dict from a schedule to its cost, without messages ahead."""
    found = strategy_costs(facts(**changes), cluster, num_examples)
    return {
        cost.schedule: cost
        for cost in found
        if len(cost.stages) == 1 and cost.schedule and not cost.messages_ahead
    }


def test_a_first_stage_of_two_ranks():
    # 9 / 2 s are nearest to 4 s; 3 s and 10 / 2 s are farther.
    named = of_two_stages(Cluster(3, megabits_per_second=RATE))
    assert len(named) == 5
    for cost in named.values():
        assert (cost.stages, cost.ranks_of_stages) == (("b",), (2, 1))
        assert cost.num_replicas == 1
        # The first machine: activations of 4 examples, and a ring of two.
        assert cost.busiest_bytes == 4 * 10 + FRONT
        assert cost.bound == "computation"
    ring, message = FRONT * 1e-6, 2 * 10e-6
    # Three passes of 4 examples, two of which are forward ones.
    late = 4 * (3 / 8 + 9 / 8)
    assert named["vanilla"].step_seconds == pytest.approx(late + ring)
    # Of each of four micro-batches a rank of the first stage has an example,
    # forward in 3 / 8 s and backward in 6 / 8 s; the second stage has two, in
    # a second. The first stage waits for that of the first one and of the last
    # one; before, between and behind are three of its passes of each kind.
    assert named["1f1b"].num_micro_batches == 4
    assert named["1f1b"].step_seconds == pytest.approx(
        3 * (3 / 8 + 6 / 8) + 2 * 1 + 4 * message + ring, rel=1e-6
    )
    # Behind all forward passes, the second stage's last forward one and its
    # first backward one.
    assert named["gpipe"].step_seconds == pytest.approx(
        4 * 3 / 8 + 1 / 3 + 2 / 3 + 4 * 6 / 8 + 2 * message + ring, rel=1e-6
    )
    held = {"vanilla": 4 * 1_010, "gpipe": 4 * 1_010, "1f1b": 2 * 1_010}
    whole = {"vanilla": 8 * 14, "gpipe": 8 * 14, "1f1b": 2 * 14}
    for name, of_front in held.items():
        assert named[name].memory_bytes == (
            4 * FRONT + of_front,
            4 * BACK + whole[name],
        )


def test_a_last_stage_of_two_ranks_and_times_of_messages():
    cluster = Cluster(3, megabits_per_second=RATE, message_seconds=1.0)
    cost = of_two_stages(cluster, seconds=LAST_IS_SLOW)["vanilla"]
    assert (cost.stages, cost.ranks_of_stages) == (("b",), (1, 2))
    # The last two machines.
    assert cost.busiest_bytes == 4 * 10 + BACK
    assert cost.memory_bytes == (4 * FRONT + 8 * 1_010, 4 * BACK + 4 * 14)
    # The first stage sends two messages and receives two; a rank of the last
    # one has two of these and two of the ring, in 8 / 2 s.
    assert cost.computation_seconds == pytest.approx(4 + 4 / 3 + 4)
    # Each of two ranks gets the rows of the other one's four examples.
    tables = (GradientSize(), GradientSize(), GradientSize(0, 50, 10**6))
    named = of_two_stages(cluster, seconds=LAST_IS_SLOW, gradients=tables)
    assert named["vanilla"].busiest_bytes == 4 * 10 + 4 * 50


@pytest.mark.parametrize(
    ("machines", "options", "seconds", "computed", "ring"),
    [
        # The two ranks of the first stage on a processor: 2 (4.5 + 1.5) s.
        ((3, 1), {"processes_per_processor": 2}, (3, 6, 4), 12, FRONT),
        # One of those of the last stage beside the first one: 4 + 4 / 3 s and
        # 8 / 2 s at once. The ring takes the link's time.
        (
            (3, 1),
            {"processes_per_processor": 2},
            LAST_IS_SLOW,
            4 + 4 / 3 + 4,
            BACK,
        ),
        # All at once, and without links.
        ((1, 3), {}, (3, 6, 4), 12 + 4, 0),
        ((1, 3), {}, LAST_IS_SLOW, 4 + 4 / 3 + 8, 0),
    ],
)
def test_ranks_that_share_a_processor(
    machines, options, seconds, computed, ring
):
    cluster = Cluster(*machines, megabits_per_second=RATE, **options)
    cost = of_two_stages(cluster, seconds=seconds)["vanilla"]
    assert cost.computation_seconds == pytest.approx(computed)
    assert cost.step_seconds == pytest.approx(computed + ring * 1e-6, rel=1e-3)


def test_three_stages_of_five_processes():
    cluster = Cluster(5, megabits_per_second=RATE)
    narrow = facts(crossing_bytes=NARROW)
    found = strategy_costs(narrow, cluster, EXAMPLES)
    by_number = {
        (len(cost.stages) + 1, cost.schedule): cost.ranks_of_stages
        for cost in found
        if cost.schedule in ("1f1b", "vanilla")
    }
    assert by_number == {
        # 3 s and 10 / 4 s: as fast as 9 / 3 s, without the sum behind these.
        (2, "1f1b"): (1, 4),
        (3, "1f1b"): (1, 2, 2),
        # With the forward passes that are computed again, 4 / 2 s and 10 / 3 s;
        # 4 s, 8 / 3 s and 4 s.
        (2, "vanilla"): (2, 3),
        (3, "vanilla"): (1, 3, 1),
    }
    rows = StrategyPlan(found, cluster, EXAMPLES).markdown()
    assert "| 2 stages of 1 + 4 |" in rows
    assert "| 3 stages of 1 + 2 + 2 |" in rows


@pytest.mark.parametrize(
    ("size", "numbers"), [(12, {2, 3}), (11, {2, 3}), (13, set()), (14, {2})]
)
def test_of_many_processes_numbers_are_equal(size, numbers):
    cluster = Cluster(size, megabits_per_second=RATE)
    found = strategy_costs(facts(), cluster, EXAMPLES)
    assert {len(c.stages) + 1 for c in found if c.schedule} == numbers


def test_fewer_examples_than_ranks():
    # A rank without one computes on a stand-in: the second has one of two.
    cluster = Cluster(3, megabits_per_second=RATE)
    cost = of_two_stages(cluster, 1)["vanilla"]
    assert cost.ranks_of_stages == (2, 1)
    assert cost.memory_bytes == (4 * FRONT + 1_010, 4 * BACK + 2 * 14)


@pytest.mark.parametrize("numbers", [(2, 2), (1, 3), (3, 2), (4, 6)])
def test_pieces_are_the_overlaps_of_ranges(numbers):
    senders, receivers = pieces(*numbers)
    for i in range(numbers[0]):
        for j in range(numbers[1]):
            begin = max(i / numbers[0], j / numbers[1])
            end = min((i + 1) / numbers[0], (j + 1) / numbers[1])
            found = sum((senders == i) & (receivers == j)) / len(senders)
            assert found == pytest.approx(max(0, end - begin))


def test_pieces_within_a_machine_do_not_travel():
    link = StageLink(range(2), range(2, 5), Cluster(2, 3))
    # Two thirds of the first rank's part stay on the first machine.
    assert link.num_pieces == 6
    assert link.sent.tolist() == [4, 0]
    assert link.received.tolist() == [0, 4]
    # Two thirds of a part and a third: two messages of three pieces at a
    # sender; two pieces at a receiver, of two senders at most.
    cluster = Cluster(5, message_seconds=1.0, message_seconds_per_byte=0.1)
    link = StageLink(range(2), range(2, 5), cluster)
    assert link.processor_seconds(10) == [2 + 3, 2 + 2]


def test_memory_of_copies_and_waiting_activations():
    named = of_two_stages(Cluster(3, megabits_per_second=RATE))
    assert named["stash"].memory_bytes[0] == 5 * FRONT + 4 * 1_010
    cluster = Cluster(5, megabits_per_second=RATE)
    narrow = facts(crossing_bytes=NARROW)
    found = strategy_costs(narrow, cluster, EXAMPLES)
    cost = next(
        c
        for c in found
        if c.schedule == "vanilla" and len(c.stages) == 2
        if not c.messages_ahead
    )
    # The second stage's three ranks have those of a mini-batch more waiting.
    assert cost.memory_bytes[1] == pytest.approx(
        4 * 4 * SIZES[1] + 8 / 3 * (2 * 1_000 + 10)
    )
