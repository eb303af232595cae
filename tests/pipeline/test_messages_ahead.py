"""Turns in which messages travel that the next turn uses, by the oracle."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.pipeline.store import Store
from keras_sparsity.stages.schedule import without_flush
from tests import pipeline_functions, pipeline_oracle
from tests.conftest import covering
from tests.pipeline import (
    fit_functions,
    length_functions,
    saved_state_functions,
    test_in_flight,
)

# Mini-batches of 8 examples, and the last one of 3: more than the 5 that are in
# flight in two stages, and than the 9 in three.
_NUM_EXAMPLES, _OF_THREE = 59, 91
_TWO = [["dense_0", "drop", "dense_1"], ["norm", "dense_2", "dense_3", "out"]]
_THREE = [
    ["dense_0", "drop"],
    ["dense_1", "norm"],
    ["dense_2", "dense_3", "out"],
]
_WAYS = [
    ("vanilla", "paper"),
    ("stash", "paper"),
    ("spectrain", "paper"),
    ("spectrain", "sequential"),
]


def _train(
    cluster,
    engine,
    rule,
    way,
    layers,
    num_examples=_NUM_EXAMPLES,
    model="line",
    replicas=1,
    options=(),
):
    """Trains and compares; `layers` are those of each stage."""
    size = len(layers) * replicas
    if isinstance(replicas, list):
        size = sum(replicas)
    ranks = cluster(engine, size, has_groups=size > 2).run(
        pipeline_functions.train_ahead,
        *(rule, [names[-1] for names in layers[:-1]], *way, num_examples),
        *(model, replicas, *options),
    )
    test_in_flight.check(
        *(ranks, rule, *way, layers, num_examples, model),
        messages_ahead=True,
    )


@pytest.mark.parametrize(
    ("engine", "rule", "schedule", "target"),
    covering(
        [
            (engine, rule, *way)
            for engine, rule in [
                ("native", "momentum"),
                ("native", "adam"),
                ("horovod", "momentum"),
            ]
            for way in _WAYS
        ],
        [],  # those of micro-batches, and in parts, below
    ),
)
def test_two_stages(cluster, engine, rule, schedule, target):
    _train(cluster, engine, rule, (schedule, target), _TWO)


@pytest.mark.parametrize(
    ("engine", "rule", "schedule", "target"),
    covering(
        [
            (engine, rule, *way)
            for engine, rule in [
                ("native", "momentum"),
                ("native", "adam"),
                ("horovod", "adam"),
            ]
            for way in _WAYS
        ],
        [],  # to the bit in `test_to_the_bit.py`
    ),
)
def test_three_stages(cluster, engine, rule, schedule, target):
    _train(cluster, engine, rule, (schedule, target), _THREE, _OF_THREE)


_PLAIN = [["dense_0", "dense_1"], ["dense_2", "dense_3", "out"]]


@pytest.mark.parametrize(
    ("rule", "way", "replicas", "options"),
    [
        ("momentum", _WAYS[3], [1, 2], (2,)),
        *(
            pytest.param(*case, marks=pytest.mark.all_cells)
            for case in [
                ("adam", _WAYS[2], 1, (2, True)),
                ("momentum", _WAYS[1], 1, (3,)),
                ("adam", _WAYS[2], 2, ()),
                ("adam", _WAYS[1], [2, 1], ()),
            ]
        ),
    ],
)
def test_parts_of_a_mini_batch(cluster, rule, way, replicas, options):
    """Micro-batches, replicas, shared stages; the last one has an example."""
    num_examples = 57
    _train(
        *(cluster, "native", rule, way, _PLAIN, num_examples, "plain line"),
        *(replicas, options),
    )


def test_rows_that_are_looked_up(cluster):
    """Rows of the mini-batches in flight are kept."""
    cuts, num_examples = ["dense_0", "dense_1"], _OF_THREE
    ranks = cluster("native", 3, has_groups=True).run(
        *(pipeline_functions.train_ahead, "momentum", cuts),
        *("stash", "paper", num_examples, "rows line"),
    )
    test_in_flight.check(
        *(ranks, "momentum", "stash", "paper", cuts, num_examples),
        "rows line",
        messages_ahead=True,
    )


# Sizes travel as in `test_in_flight.py`, in the same messages.
@pytest.mark.all_cells
@pytest.mark.parametrize("number", [1, 2])
def test_sizes_that_differ_between_mini_batches_in_flight(cluster, number):
    """Also of those that no stage behind the first has computed yet."""
    ranks = cluster("native", 3, has_groups=True).run(
        *(length_functions.trained, "momentum", "stash", number, True)
    )
    test_in_flight.check_lengths(ranks, "stash", messages_ahead=True)


def test_fewer_mini_batches_than_in_flight(cluster):
    """The pipeline is emptied before any mini-batch has come back."""
    num_examples = 13
    layers = [["dense_0"], ["drop", "dense_1", "norm"], ["dense_2"]]
    layers.append(["dense_3", "out"])
    ranks = cluster("native", 4, has_groups=True).run(
        *(pipeline_functions.train_ahead, "momentum"),
        *(["dense_0", "norm", "dense_2"], "spectrain", "paper", num_examples),
    )
    network = pipeline_functions.made("line")
    stages = [
        pipeline_oracle.Stage([network.get_layer(n) for n in names], "momentum")
        for names in layers
    ]
    x, y = pipeline_functions.data("dense", num_examples)
    size = pipeline_functions.BATCH_SIZE
    batches = [
        (x[:size].astype("float64"), y[:size]),
        (x[size:].astype("float64"), y[size:]),
    ]
    for _ in range(2):
        pipeline_oracle.train(stages, batches, "spectrain", "paper", True)
    for values, *_ in ranks:
        for value, expected in zip(values, network.get_weights(), strict=True):
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)


# Of models of several inputs, to the bit, in `test_to_the_bit.py`.
@pytest.mark.all_cells
@pytest.mark.parametrize("schedule", ["vanilla", "stash", "spectrain"])
def test_one_mini_batch_an_epoch(cluster, schedule):
    """Masks, two inputs and outputs: nothing is out of date."""
    name = "one_batch_an_epoch"
    arrays, history = fit_functions.run(name)
    for found, logs in cluster("native", 2).run(
        fit_functions.run, name, schedule, 1, "paper", True
    ):
        assert logs.keys() == history.keys()
        for key, values in history.items():
            np.testing.assert_allclose(logs[key], values, rtol=1e-4)
        for value, expected in zip(found, arrays, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


def test_a_dataset_of_unknown_length(cluster):
    """The step that finds its end sends and receives nothing."""
    known, unknown = (
        cluster("native", 2).run(
            fit_functions.unknown_number_of_batches, "vanilla", is_known, True
        )
        for is_known in (True, False)
    )
    for (weights, history), (others, other_history) in zip(
        *map(itertools.chain.from_iterable, (known, unknown)), strict=True
    ):
        for name, values in history.items():
            np.testing.assert_allclose(values, other_history[name], rtol=1e-5)
        for value, expected in zip(weights, others, strict=True):
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-6)


@pytest.mark.all_cells
def test_eager_steps_are_those_of_traced_ones(cluster):
    """No message is waited for before it is sent."""
    for found, expected in cluster("native", 2).run(
        fit_functions.eager, "spectrain", True, timeout=60
    ):
        for value, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-6)


def test_evaluation_and_other_layouts_in_between(cluster):
    """`train_on_batch`, by the oracle, which empties its pipeline there."""
    ranks = cluster("native", 2).run(fit_functions.in_parts)
    network = pipeline_functions.made("line")
    stages = [
        pipeline_oracle.Stage([network.get_layer(n) for n in names], "momentum")
        for names in _TWO
    ]
    x, y = fit_functions.parts()[0][0]
    predicted = []
    for batches in fit_functions.parts():
        pipeline_oracle.train(stages, batches, "vanilla", "paper", True)
        predicted.append(network(x, training=False).numpy())
    expected = [predicted[0], *network.get_weights()]
    expected_loss = np.square(predicted[1] - y).mean() + sum(network.losses)
    for found, loss, message in ranks:
        for value, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, other, rtol=0, atol=1e-12)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        assert "mini-batches in flight have the same structure" in message


@pytest.mark.parametrize(
    ("engine", "schedule"),
    covering(
        itertools.product(("native", "horovod"), ("vanilla", "spectrain")),
        # Nothing is in flight when all is saved: `test_saved_state.py`.
        [],
    ),
)
def test_resumed_in_the_middle_of_an_epoch(cluster, tmp_path, engine, schedule):
    arguments = schedule, "sgd", ["dense_1"], 1, True
    ranks = cluster(engine, 2).run(
        *(saved_state_functions.train_and_resume, "pipeline", arguments),
        *(str(tmp_path), _NUM_EXAMPLES, 19),
    )
    for whole, stopped, resumed in ranks:
        for value, other in zip(whole[0], resumed[0], strict=True):
            np.testing.assert_array_equal(value, other)
        for path, value in whole[1].items():
            np.testing.assert_array_equal(value, resumed[1][path])
        assert whole[2:] == resumed[2:]
        assert np.abs(stopped[0][0] - whole[0][0]).max() > 1e-4


@pytest.mark.parametrize(
    ("num_stages", "schedule"), test_in_flight.tasks_of_runs((3, "spectrain"))
)
def test_a_run_has_the_tasks_of_the_schedule(cluster, num_stages, schedule):
    """While the pipeline fills, is full and empties."""
    # Two more than are in flight.
    num_steps = 4 * (num_stages - 1) + 3
    ranks = cluster("native", num_stages, has_groups=True).run(
        *(pipeline_functions.recorded, num_steps, True, num_stages, schedule)
    )
    planned = without_flush(num_stages, num_steps, messages_ahead=True)
    for tasks, of_stage in zip(ranks, planned.stages, strict=True):
        assert tasks == [(task.kind.value, task.batch) for task in of_stage]


# To the bit the oracle's: `test_to_the_bit.py`.
@pytest.mark.all_cells
def test_missed_updates_and_distances_as_they_run(cluster):
    """4 (N - 1 - k) are missed, and 2 k come until the round trip ends."""
    size, num_steps = 4, 14
    ranks = cluster("native", size, has_groups=True).run(
        pipeline_functions.counted, num_steps, True
    )
    for k, (missed, ahead) in enumerate(ranks):
        num_ahead, beyond = 4 * (size - 1 - k), 2 * k
        in_flight = [min(step, num_ahead) for step in range(num_steps)]
        assert missed == in_flight
        # While the pipeline empties, to no update that is not to come.
        later = [num_steps - 1 - step for step in range(num_steps)]
        first = 2 * k
        forward = [
            number + (beyond if step + first < num_steps else min(beyond, left))
            for step, (number, left) in enumerate(
                zip(in_flight, later, strict=True)
            )
        ]
        backward = [
            beyond
            if step + first + num_ahead < num_steps
            else min(beyond, left)
            for step, left in enumerate(later)
        ]
        expected = forward
        if num_ahead:
            expected = forward + backward
        assert sorted(ahead) == sorted(expected)


# What messages ahead add: `test_memory.py`, `tests/stages`.
@pytest.mark.all_cells
def test_plan(cluster, tmp_path):
    """Sizes worked out by hand; 3 stages of 2, 3 and 3 layers."""
    ranks = cluster("native", 3, has_groups=True).run(
        pipeline_functions.planned, "stash", str(tmp_path), True
    )
    plan = ranks[0][0]
    assert all(each[0] == plan and all(each[2:]) for each in ranks)
    layer, activation = 4 * (16 * 16 + 16), 4 * 12 * 16
    for k, stage in enumerate(plan.stages):
        num_ahead, num_layers = 4 * (2 - k), (2, 3, 3)[k]
        assert stage.missed_updates == num_ahead
        made = activation * num_layers
        if not num_ahead:
            made //= 4  # of one micro-batch at a time
        # Weights, gradients, Adam's slots and counters, and the copies.
        weights = (4 + num_ahead) * num_layers * layer + 8 + 4
        # Of the next mini-batch, too: it has come.
        taken = (num_ahead + 1 + (k > 0)) * activation
        assert stage.memory_bytes == weights + taken + made


def test_tensors_without_elements_stand_for_missing_ones():
    store = Store([tf.TensorSpec([None, 3]), tf.TensorSpec([], tf.int32)])

    @tf.function
    def taken(condition):
        return store.take_if(condition)

    rows, number = taken(tf.constant(False))
    assert (rows.shape, int(number)) == ((0, 3), 0)
    store.put([tf.ones([2, 3]), tf.constant(7)])
    rows, number = taken(tf.constant(True))
    assert (rows.shape, int(number)) == ((2, 3), 7)
    assert float(tf.reduce_sum(rows)) == 6
