"""Predicted steps of all ways to train a chain, against hand-made numbers.

Three calls take 3, 6 and 4 s for 8 examples, a third of it forward. The narrow
place is after the second one.
"""

import dataclasses

import pytest

from keras_sparsity.board.strategy_plan import StrategyPlan, described
from keras_sparsity.planning import Cluster, VariableSpec
from keras_sparsity.stages.column_split import ColumnSize
from keras_sparsity.stages.costs import ModelFacts
from keras_sparsity.stages.layer_placement import LayerSize
from keras_sparsity.stages.profile import GradientSize, OwnedRows, Profile
from keras_sparsity.stages.split_costs import split_costs
from keras_sparsity.stages.strategy_costs import strategy_costs

SIZES = (100, 1_000, 10_000)  # parameters
CROSSING = {0: 2_000_000, 1: 10}
# Behind the first call, too.
NARROW = {0: 1_000, 1: 10}
EXAMPLES = 8
RATE = 8.0  # a byte takes a microsecond


def facts(**changes):
    profile = Profile(
        names=("a", "b", "c"),
        sizes=tuple(LayerSize("dense", size, 1) for size in SIZES),
        seconds=(3.0, 6.0, 4.0),
        num_examples=EXAMPLES,
        crossing_bytes=CROSSING,
        gradients=tuple(GradientSize(4 * size) for size in SIZES),
        update_seconds=(0.0, 0.0, 0.0),
    )
    return ModelFacts(
        profile=dataclasses.replace(profile, **changes),
        forward_share=1 / 3,
        returned_bytes=changes.get("crossing_bytes", CROSSING),
        weight_bytes=tuple(4 * size for size in SIZES),
        output_bytes=(1_000, 10, 4),
        num_slots=2,
        num_averages=1,
        specs=tuple(VariableSpec(f"v{size}", (size,)) for size in SIZES),
    )


def costs(cluster, num_examples=EXAMPLES, **changes):
    found = strategy_costs(facts(**changes), cluster, num_examples)
    named = {
        (cost.schedule or cost.way): cost
        for cost in found
        if not cost.ranks_of_stages
    }
    return found, named


@pytest.mark.parametrize(
    ("of_messages", "cut"),
    [
        # 6 s and 7 s; 9 s and 4 s.
        ({}, "a"),
        # 1 MB takes 1 s where it is sent, and where its gradients arrive.
        ({"message_seconds_per_byte": 1e-6}, "a"),
        ({"message_seconds_per_byte": 1.2e-6}, "b"),
        # Both cuts have as many messages.
        ({"message_seconds": 3.0}, "a"),
    ],
)
def test_cuts_count_the_processor_time_of_messages(of_messages, cut):
    _, named = costs(
        Cluster(2, megabits_per_second=RATE, **of_messages),
        seconds=(6.0, 3.0, 4.0),
        crossing_bytes={0: 1_000_000 / EXAMPLES, 1: 10},
    )
    assert named["1f1b"].stages == named["gpipe"].stages == (cut,)


def test_two_machines():
    found, named = costs(Cluster(2, megabits_per_second=RATE))
    assert [cost.schedule or cost.way for cost in found] == [
        "data parallelism",
        "1f1b",
        "gpipe",
        *("spectrain", "stash", "vanilla"),
        "layer placement",
    ]
    seconds = {name: cost.step_seconds for name, cost in named.items()}
    message = 10 * 1e-6  # of one example, the best of the micro-batches
    assert seconds == pytest.approx(
        {
            # Half of the passes; in a ring of two each sends all gradients.
            "data parallelism": 13 / 2 + 44_400e-6,
            # The first stage works for 9 s and waits once, for the second's
            # two passes of an example, while it makes one of 3 / 8 s.
            "1f1b": 9 + 4 / 8 - 3 / 8 + 2 * message,
            # It waits for them behind its own forward passes.
            "gpipe": 9 + 4 / 8 + 2 * message,
            # It computes its forward pass again.
            **dict.fromkeys(("vanilla", "stash", "spectrain"), 12.0),
            "layer placement": 9 + 4 + 2 * 80e-6,
        },
        rel=1e-9,
    )
    for name, cost in named.items():
        is_late = name in ("vanilla", "stash", "spectrain")
        assert cost.missed_updates == is_late
        assert cost.is_exact == (not is_late)
        whole = name == "data parallelism"
        assert cost.stages == (() if whole else ("b",))
        assert cost.busiest_bytes == (44_400 if whole else 80)
        assert cost.bound == "computation"
    assert named["gpipe"].num_micro_batches == EXAMPLES
    front, back = 4_400, 40_000
    held = 8 * 1_010, 8 * 14
    assert {name: cost.memory_bytes for name, cost in named.items()} == {
        "data parallelism": (44_400 * 4 + 4 * 1_014,),
        "layer placement": (front * 4 + held[0], back * 4 + held[1]),
        "gpipe": (front * 4 + held[0], back * 4 + held[1]),
        # Of two micro-batches of an example, and of one.
        "1f1b": (front * 4 + 2 * 1_010, back * 4 + 14),
        "vanilla": (front * 4 + held[0], back * 4 + held[1]),
        "stash": (front * 5 + held[0], back * 4 + held[1]),
        "spectrain": (front * 6 + held[0], back * 6 + held[1]),
    }


def test_passes_that_are_computed_again_move_the_cut():
    cluster = Cluster(2, megabits_per_second=RATE)
    _, named = costs(cluster, crossing_bytes=NARROW)
    assert named["1f1b"].stages == ("b",)
    for schedule in ("vanilla", "stash", "spectrain"):
        # 4 s and 10 s in place of 12 s and 4 s.
        assert named[schedule].stages == ("a",)
        assert named[schedule].step_seconds == pytest.approx(10)


def test_slow_links_and_latency():
    cluster = Cluster(2, megabits_per_second=RATE / 1_000, latency_seconds=0.5)
    found, named = costs(cluster)
    whole = named["data parallelism"]
    assert whole.step_seconds == pytest.approx(13 / 2 + 44.4 + 2 * 0.5)
    assert whole.bound == "link"
    placed = named["layer placement"]
    assert placed.step_seconds == pytest.approx(13 + 2 * (0.08 + 0.5))
    assert found[0].schedule == "1f1b"


@pytest.mark.parametrize(
    ("latency", "in_turn", "ahead"),
    [
        # In two steps a round trip of 3 + 4 + 9 s and two messages.
        (6.0, 8 + 6, 12.0),
        # A message.
        (18.0, 8 + 18, 18),
    ],
)
def test_messages_ahead(latency, in_turn, ahead):
    cluster = Cluster(2, megabits_per_second=RATE, latency_seconds=latency)
    found, _ = costs(cluster)
    named = {
        cost.messages_ahead: cost for cost in found if cost.schedule == "stash"
    }
    assert named[False].step_seconds == pytest.approx(in_turn, rel=1e-4)
    assert named[True].step_seconds == pytest.approx(ahead, rel=1e-4)
    assert [named[each].missed_updates for each in (False, True)] == [1, 4]
    # Four copies of weights in place of one; a message more.
    front, back = 4_400, 40_000
    assert named[True].memory_bytes == (
        front * 8 + 8 * 1_010,
        back * 4 + 8 * 14 + 80,
    )
    assert described(named[True]) == "pipeline 'stash', messages ahead"


def test_messages_take_the_time_of_processors():
    of_messages = {"message_seconds": 1.0, "message_seconds_per_byte": 1e-3}
    cluster = Cluster(2, megabits_per_second=RATE, **of_messages)
    _, named = costs(cluster)
    # Both passes of the slower stage send or receive one, of 80 bytes.
    assert named["vanilla"].step_seconds == pytest.approx(12 + 2 * 1.08)
    # Smaller parts of a mini-batch cost more than they gain.
    flushed = named["1f1b"]
    assert flushed.num_micro_batches == 2
    assert flushed.computation_seconds == pytest.approx(9 + 2 * 2 + 2 * 0.08)
    # A sum sends and receives; activations go on, and gradients back.
    works = {
        "data parallelism": 13 / 2 + 2 * (1 + 44.4),
        "layer placement": 13 + 2 * 2 * 1.08,
    }
    for way, seconds in works.items():
        cost = named[way]
        assert cost.computation_seconds == pytest.approx(seconds)
        assert cost.step_seconds == pytest.approx(seconds + cost.link_seconds)
    assert named["data parallelism"].link_seconds == pytest.approx(0.0444)
    assert named["layer placement"].link_seconds == pytest.approx(160e-6)
    # Of two processes at one processor.
    shared = dataclasses.replace(cluster, processes_per_processor=2)
    _, named = costs(shared)
    whole = named["data parallelism"].computation_seconds
    assert whole == pytest.approx(2 * works["data parallelism"])
    # Replicas of the last stage sum 40,000 bytes of gradients.
    _, named = costs(dataclasses.replace(cluster, num_machines=4))
    assert named["vanilla"].computation_seconds == pytest.approx(
        4 / 2 + 2 * 1.04 + 2 * (1 + 40)
    )
    # Links within a machine take no time, processors do.
    _, named = costs(Cluster(1, 2, megabits_per_second=RATE, **of_messages))
    whole = named["data parallelism"]
    assert whole.link_seconds == 0
    assert whole.step_seconds == pytest.approx(2 * works["data parallelism"])


@pytest.mark.parametrize(
    ("cluster", "num_ends", "row_bytes"),
    [
        # A sum of dense gradients; numbers, rows and their gradients.
        ((2, 1), 2 * (1 + 3), 520),
        # Two sums: where nothing travels on a link, the first way is chosen.
        ((1, 2), 2 * (1 + 1), 4_000),
    ],
)
def test_rows_of_tables_take_the_time_of_processors(
    cluster, num_ends, row_bytes
):
    table = VariableSpec("table", (1_000, 1), 0.1)
    made = dataclasses.replace(facts(), specs=(table, *facts().specs[1:]))
    of_messages = {"message_seconds": 1.0, "message_seconds_per_byte": 1e-3}
    options = {"megabits_per_second": RATE, "processes_per_processor": 1}

    def found(cluster, options):
        made_costs = strategy_costs(
            made, Cluster(*cluster, **options), EXAMPLES
        )
        return next(c for c in made_costs if c.way == "data parallelism")

    dense_bytes = found((2, 1), options).busiest_bytes - 520
    free, counted = (
        found(cluster, each) for each in (options, options | of_messages)
    )
    expected = num_ends + 2e-3 * (dense_bytes + row_bytes)
    assert counted.step_seconds - free.step_seconds == pytest.approx(expected)


def test_stages_of_two_replicas():
    found, named = costs(Cluster(4, megabits_per_second=RATE))
    # Also 3 stages, of which one has two processes; and there are 3 calls.
    in_turn = [cost for cost in found if not cost.messages_ahead]
    assert len(in_turn) == 1 + 2 + 5 + 5
    pipeline = named["1f1b"]
    assert (pipeline.num_replicas, pipeline.stages) == (2, ("b",))
    # Activations or gradients of 4 examples, and the ring of the last stage.
    assert pipeline.busiest_bytes == 40 + 40_000
    # As of two machines with half of the examples, and then the slower stage
    # has summed its gradients first.
    half, _ = costs(Cluster(2, megabits_per_second=RATE), 4)
    alone = next(cost for cost in half if cost.schedule == "1f1b")
    ring = 4_400e-6
    assert pipeline.step_seconds == pytest.approx(alone.step_seconds + ring)
    tails = [cost for cost in found if cost.num_tails]
    assert {cost.num_tails: cost.num_replicas for cost in tails} == {1: 3, 2: 2}


def test_processes_share_a_processor_and_machines_differ_in_speed():
    _, named = costs(
        Cluster(2, megabits_per_second=RATE, processes_per_processor=2)
    )
    assert named["data parallelism"].step_seconds == pytest.approx(13.0444)
    assert named["1f1b"].step_seconds == pytest.approx(13)
    assert named["vanilla"].step_seconds == pytest.approx(12 + 4)
    _, named = costs(Cluster(2, megabits_per_second=RATE, relative_speed=2.0))
    assert named["data parallelism"].step_seconds == pytest.approx(3.2944)
    assert named["vanilla"].step_seconds == pytest.approx(6)
    assert named["layer placement"].step_seconds == pytest.approx(6.50016)


def test_within_a_machine_nothing_travels():
    found, _ = costs(Cluster(1, 2, megabits_per_second=RATE))
    assert {cost.busiest_bytes for cost in found} == {0}
    # On two machines of two, a stage's ring stays within its machine.
    found, named = costs(Cluster(2, 2, megabits_per_second=RATE))
    assert named["1f1b"].busiest_bytes == 2 * 40


def test_steps_that_do_not_get_shorter_with_fewer_examples():
    cluster = Cluster(2, megabits_per_second=RATE)
    found, named = costs(cluster, fixed_seconds=(3.0, 6.0, 4.0))
    assert named["data parallelism"].step_seconds == pytest.approx(13.0444)
    # More micro-batches only take longer.
    assert named["1f1b"].num_micro_batches == 2
    assert named["1f1b"].computation_seconds == pytest.approx(2 * 9)


def test_a_call_whose_weights_take_its_time():
    # Each part of the second call takes 6 s, those of others their share.
    cluster = Cluster(2, megabits_per_second=RATE)
    _, named = costs(cluster, fixed_seconds=(0.0, 6.0, 0.0))
    computed = named["data parallelism"].computation_seconds
    assert computed == pytest.approx(6 + (3 + 4) / 2)
    assert named["gpipe"].num_micro_batches == 2
    assert named["gpipe"].computation_seconds == pytest.approx(2 * 6 + 3)


def test_sums_of_gradients_take_their_time():
    cluster = Cluster(2, megabits_per_second=RATE)
    _, without = costs(cluster)
    _, named = costs(cluster, sum_seconds=(0.0, 0.5, 0.25))
    for name in ("gpipe", "1f1b"):
        # The first stage has the first two calls; one sum fewer than passes.
        number = named[name].num_micro_batches
        computed = named[name].computation_seconds
        assert computed == pytest.approx(9 + (number - 1) * 0.5)
    # Without micro-batches nothing is added.
    assert named["vanilla"] == without["vanilla"]
    assert named["data parallelism"] == without["data parallelism"]


def test_times_of_a_crowded_machine():
    every = {
        "update_seconds": (0.0, 1.0, 2.0),
        "fixed_seconds": (1.0, 2.0, 3.0),
        "sum_seconds": (0.0, 0.5, 0.25),
    }
    # With half of its times on a processor of half the speed.
    slow = Cluster(2, megabits_per_second=RATE, relative_speed=0.5)
    expected = strategy_costs(facts(**every), slow, EXAMPLES)
    cluster = Cluster(2, megabits_per_second=RATE)
    found = strategy_costs(facts(**every).crowded(2.0), cluster, EXAMPLES)
    others = [
        [cost for cost in each if cost.way != "layer placement"]
        for each in (found, expected)
    ]
    assert others[0] == others[1]


def test_a_single_tail_worker_computes_alone():
    profile = facts(update_seconds=(0.0, 1.0, 2.0)).profile
    expected = split_costs(profile, 1, 1, EXAMPLES)
    found = split_costs(profile.crowded(3.0), 1, 1, EXAMPLES)
    for cost, other in zip(found, expected, strict=True):
        head = slice(cost.place + 1)
        of_head = sum(profile.pass_seconds(EXAMPLES, head))
        of_head += sum(profile.update_seconds[head])
        assert cost.seconds - other.seconds == pytest.approx(2 * of_head)
    *_, of_two = split_costs(profile.crowded(3.0), 2, 2, EXAMPLES)
    *_, other = split_costs(profile, 2, 2, EXAMPLES)
    works = other.seconds - other.link_seconds
    assert of_two.seconds - of_two.link_seconds == pytest.approx(3 * works)


def test_updates_take_their_time():
    _, named = costs(
        Cluster(2, megabits_per_second=RATE), update_seconds=(0.0, 1.0, 2.0)
    )
    assert named["data parallelism"].step_seconds == pytest.approx(9.5444)
    assert named["vanilla"].step_seconds == pytest.approx(12 + 1)
    # The first stage updates behind its last pass.
    assert named["gpipe"].step_seconds == pytest.approx(9 + 0.5 + 2e-5 + 1)
    # The head's and the tail's follow their passes.
    assert named["layer placement"].step_seconds == pytest.approx(16.00016)


@pytest.mark.parametrize(
    ("memory_bytes", "number", "fits"),
    [
        # Of the last stage, whose weights, gradients and slots are 160,000
        # bytes, and of a half, a quarter or an eighth of 8 examples 14 each.
        (None, 2, True),
        (160_056, 2, True),
        (160_055, 4, True),
        (160_027, 8, True),
        (160_013, 8, False),
    ],
)
def test_micro_batches_fit_the_memory(memory_bytes, number, fits):
    # Small parts of a mini-batch take longer.
    cluster = Cluster(
        2,
        megabits_per_second=RATE,
        message_seconds=1.0,
        memory_bytes=memory_bytes,
    )
    _, named = costs(cluster)
    assert named["1f1b"].num_micro_batches == number
    assert named["1f1b"].fits == fits


@pytest.mark.parametrize(
    ("memory_bytes", "last", "fits"),
    [
        # Of the tail: the last two layers, or the last one and its inputs.
        (None, "a", True),
        (44_000 * 4 + 8 * (10 + 14), "a", True),
        (44_000 * 4 + 8 * (10 + 14) - 1, "b", True),
        (40_000 * 4 + 8 * (1_000 + 4) - 1, "b", False),
    ],
)
def test_tails_fit_the_memory(memory_bytes, last, fits):
    cluster = Cluster(2, megabits_per_second=RATE, memory_bytes=memory_bytes)
    _, named = costs(cluster, crossing_bytes={0: 10, 1: 1_000})
    assert named["layer placement"].stages == (last,)
    assert named["layer placement"].fits == fits


def test_ways_that_do_not_fit_come_last():
    cluster = Cluster(2, megabits_per_second=RATE, memory_bytes=165_000)
    found, named = costs(cluster)
    assert not named["data parallelism"].fits
    assert named["data parallelism"].bound == "memory"
    assert [cost.fits for cost in found] == [True] * 5 + [False] * 2
    plan = StrategyPlan(found, cluster, EXAMPLES)
    assert plan.best().schedule == "1f1b"
    rows = plan.markdown().splitlines()
    assert "1f1b" in rows[2] and "| yes |" in rows[2]
    small = dataclasses.replace(cluster, memory_bytes=1_000)
    found, _ = costs(small)
    with pytest.raises(ValueError, match="fits the memory.*160.*1f1b"):
        StrategyPlan(found, small, EXAMPLES).best()


def test_late_updates_only_where_they_are_allowed():
    cluster = Cluster(2, megabits_per_second=RATE)
    # Of one example, with nothing to overlap a pass with.
    found, named = costs(cluster, 1, gradients=(GradientSize(10**9),) * 3)
    plan = StrategyPlan(found, cluster, 1)
    assert plan.best(asynchronous=True).schedule == "spectrain"
    assert named["vanilla"].step_seconds == pytest.approx(12 / 8)
    assert plan.best().schedule in ("gpipe", "1f1b", None)
    assert plan.best().is_exact
    of_late = tuple(cost for cost in found if not cost.is_exact)
    with pytest.raises(ValueError, match="miss updates.*'spectrain'.*=True"):
        StrategyPlan(of_late, cluster, 1).best()


def test_several_tails_divide_what_is_faster():
    """By columns, each computes the second layer for the whole batch."""
    size = ColumnSize(40_000, 10, 40)
    columns = {"columns": (None, None, size), "crossing_bytes": {0: 1}}
    cluster = Cluster(4, megabits_per_second=RATE)
    found, _ = costs(cluster, **columns)
    (placed,) = (cost for cost in found if cost.num_tails == 2)
    profile = facts(**columns).profile
    by_bytes, *_ = (
        split_costs(profile, 2, 2, EXAMPLES, cluster, tail_split=way)[0]
        for way in (None, "batch")
    )
    assert by_bytes.tail_split == "columns"
    assert placed.tail_split == "batch"
    assert placed.step_seconds < by_bytes.seconds


def with_pairs(number, pairs, **changes):
    """Costs of ways in stages, of a model with pairs at some calls."""
    made = dataclasses.replace(facts(**changes), pairs=pairs)
    cluster = Cluster(number, megabits_per_second=RATE)
    whole, *others = sorted(
        strategy_costs(made, cluster, EXAMPLES),
        key=lambda cost: cost.way != "data parallelism",
    )
    assert whole.way == "data parallelism"
    return others


def test_pairs_of_examples_stay_in_whole_mini_batches():
    # As many stages as processes, without micro-batches.
    found = with_pairs(3, (1,))
    pipelines = [cost for cost in found if cost.schedule]
    assert {"1f1b", "gpipe", "stash"} <= {cost.schedule for cost in pipelines}
    for cost in pipelines:
        assert cost.stages == ("a", "b") and cost.num_micro_batches == 1
        assert (cost.num_replicas, cost.ranks_of_stages) == (1, ())
    # One tail worker has them; the workers of a head have parts.
    placed = [cost for cost in found if not cost.schedule]
    assert [(cost.stages, cost.num_tails) for cost in placed] == [(("a",), 1)]
    assert with_pairs(3, (0,)) == pipelines
    # A single worker has whole mini-batches, too.
    assert any(not cost.schedule for cost in with_pairs(2, (0,)))


def test_pairs_in_tails_that_divide_columns():
    columns = None, None, ColumnSize(40_000, 10, 40)
    found = with_pairs(4, (2,), columns=columns)
    divided = {cost.num_tails: cost.tail_split for cost in found}
    assert divided == {1: "batch", 2: "columns"}
    assert [cost.num_tails for cost in with_pairs(4, (2,))] == [1]


@pytest.mark.parametrize(("alpha", "share"), [(0.2, 1 / 2), (1.0, 1)])
def test_memory_of_tables_that_each_process_has_whole(alpha, share):
    owned = OwnedRows("table", 100, 400, 1, 4, 4)
    made = facts(
        gradients=(GradientSize(owned=(owned,)), *facts().profile.gradients[1:])
    )
    table = VariableSpec("table", (100, 1), alpha)
    made = dataclasses.replace(made, specs=(table, *made.specs[1:]))
    cluster = Cluster(2, megabits_per_second=RATE)
    found = strategy_costs(made, cluster, EXAMPLES)
    whole = next(c for c in found if c.way == "data parallelism")
    # Weights, gradients and two slots.
    state = 4 * (share * 400 + 4_000 + 40_000)
    assert whole.memory_bytes == (state + 4 * 1_014,)


def test_models_without_cuts_are_trained_by_data_parallelism():
    found, _ = costs(Cluster(2, megabits_per_second=RATE), crossing_bytes={})
    assert [cost.way for cost in found] == ["data parallelism"]


def test_rate_must_be_known():
    with pytest.raises(ValueError, match="megabits_per_second"):
        costs(Cluster(2))


def test_full_messages_of_gradients_travel_during_the_backward_pass():
    sizes = (10**6, 10**6, 2 * 10**6)  # parameters
    made = dataclasses.replace(
        facts(gradients=tuple(GradientSize(4 * size) for size in sizes)),
        specs=tuple(VariableSpec(f"v{i}", (n,)) for i, n in enumerate(sizes)),
    )
    for rate, per_byte, expected in (
        # The last layer's gradients travel for 1 s while 3 s are computed.
        (64.0, None, 13 / 2 + 1.0),
        # They travel for 8 s, from the end of the last backward pass on, and
        # the others behind them.
        (8.0, None, 13 / 2 / 3 + 2 * 2 / 3 + 8.0 + 8.0),
        # Each message takes processors 1 s, too: one of them from the passes.
        (64.0, 1 / 16e6, 13 / 2 + 1.0 + 2.0),
        (8.0, 1 / 16e6, 13 / 2 / 3 + 2 * 2 / 3 + 9.0 + 9.0),
    ):
        cluster = Cluster(
            2, megabits_per_second=rate, message_seconds_per_byte=per_byte
        )
        found = strategy_costs(made, cluster, EXAMPLES)
        whole = next(c for c in found if c.way == "data parallelism")
        assert whole.step_seconds == pytest.approx(expected)
