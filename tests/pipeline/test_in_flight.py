"""Schedules without a flush train as the oracle does, slot by slot."""

import functools

import keras
import numpy as np
import pytest

from keras_sparsity.stages.schedule import without_flush
from tests import pipeline_functions, pipeline_oracle
from tests.conftest import covering, engines
from tests.pipeline import length_functions

# The layers of each stage; the number of mini-batches of an epoch is not one
# of full ones.
_STAGES = {
    2: [["dense_0", "drop", "dense_1"], ["norm", "dense_2", "dense_3", "out"]],
    3: [
        ["dense_0", "drop"],
        ["dense_1", "norm"],
        ["dense_2", "dense_3", "out"],
    ],
    4: [
        ["dense_0"],
        ["drop", "dense_1", "norm"],
        ["dense_2"],
        ["dense_3", "out"],
    ],
}
_NUM_EXAMPLES = 59
_SCHEDULES = [
    ("vanilla", "paper"),
    ("stash", "paper"),
    ("spectrain", "paper"),
    ("spectrain", "sequential"),
]


@functools.cache
def _expected(rule, num_stages, schedule, target):
    return _of_oracle(rule, schedule, target, _STAGES[num_stages])


def _of_oracle(
    rule,
    schedule,
    target,
    layers,
    num_examples=_NUM_EXAMPLES,
    model="line",
    messages_ahead=False,
):
    network = pipeline_functions.made(model)
    stages = [
        pipeline_oracle.Stage(each, rule)
        for each in _layers_of(network, layers)
    ]
    x, y = pipeline_functions.data(model, num_examples)
    size = pipeline_functions.BATCH_SIZE
    batches = [
        (x[begin : begin + size].astype("float64"), y[begin : begin + size])
        for begin in range(0, num_examples, size)
    ]
    losses = [
        pipeline_oracle.train(stages, batches, schedule, target, messages_ahead)
        for _ in range(2)
    ]
    shares = np.array([len(x) for x, _ in batches])
    return network.get_weights(), losses, shares


def _layers_of(network, layers):
    """The layers of each stage, or a model of all of them.

    Args:
        network: the model.
        layers: list of lists of layers' names; or list of the names of those
            that it is cut behind.
    """
    if not isinstance(layers[0], str):
        return [[network.get_layer(n) for n in names] for names in layers]
    ends = [network.get_layer(name).output for name in layers]
    return [
        [keras.Model(begin, end)]
        for begin, end in zip(
            [network.input, *ends], [*ends, network.output], strict=True
        )
    ]


def _check(ranks, rule, num_stages, schedule, target):
    expected = _expected(rule, num_stages, schedule, target)
    _check_as(ranks, num_stages - 1, expected)


def check(ranks, rule, schedule, target, layers, *args, **options):
    """Compares ranks with the oracle, of stages as `_layers_of` takes them."""
    expected = _of_oracle(rule, schedule, target, layers, *args, **options)
    behind = len(layers) - 1 + isinstance(layers[0], str)
    late = 4 * behind if options.get("messages_ahead") else behind
    _check_as(ranks, late, expected)


def _check_as(ranks, late, oracle):
    weights, losses, shares = oracle
    for values, history, seen, iterations in ranks:
        for value, expected in zip(values, weights, strict=True):
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)
        means = [(each @ shares) / shares.sum() for each in losses]
        np.testing.assert_allclose(history["loss"], means, rtol=1e-5)
        assert history == ranks[0][1]
        assert iterations == 2 * len(shares)
        # Running means; the logs of so many mini-batches ago on all ranks.
        of_epoch = seen[: len(shares)]
        running = np.cumsum(losses[0] * shares) / np.cumsum(shares)
        assert of_epoch[:late] == [0.0] * late
        np.testing.assert_allclose(
            of_epoch[late:], running[: len(shares) - late], rtol=1e-5
        )
        # Known when all mini-batches have come back.
        first_of_next = seen[len(shares) :][:late]
        np.testing.assert_allclose(first_of_next, means[0], rtol=1e-5)
        assert seen == ranks[0][2]


def _micro_batched(
    engine, rule, way, num_stages, number, run_eagerly=False, is_usual=True
):
    """Cases of `test_micro_batches` without tables, a list of one."""
    cuts = ["dense_1"] if num_stages == 2 else ["dense_0", "dense_2"]
    options = number, run_eagerly
    return [
        pytest.param(
            *(engine, rule, *way, "plain line", cuts, options),
            marks=[
                *engines(engine)[0].marks,
                *[pytest.mark.all_cells] * (not is_usual),
            ],
        )
    ]


def tasks_of_runs(*usual):
    """Cases of runs whose tasks are noted: stages, and a schedule of each."""
    return [
        pytest.param(
            *(num_stages, schedule),
            marks=[pytest.mark.all_cells]
            * ((num_stages, schedule) not in usual),
        )
        for num_stages in (2, 3, 4)
        for schedule in ("vanilla", "stash", "spectrain")
    ]


# Rules differ in what SpecTrain predicts.
@pytest.mark.parametrize(
    ("engine", "rule", "schedule", "target"),
    covering(
        [
            *(
                ("native", rule, *schedule)
                for rule in ("sgd", "momentum", "adam")
                for schedule in _SCHEDULES
            ),
            *(("horovod", "adam", *schedule) for schedule in _SCHEDULES),
        ],
        # The others to the bit, of three stages, in `test_to_the_bit.py`.
        [("horovod", "adam", "spectrain", "sequential")],
    ),
)
def test_four_stages(cluster, engine, rule, schedule, target):
    ranks = cluster(engine, 4, has_groups=True).run(
        pipeline_functions.train_in_flight,
        rule,
        ["dense_0", "norm", "dense_2"],
        schedule,
        target,
        _NUM_EXAMPLES,
    )
    _check(ranks, rule, 4, schedule, target)


@pytest.mark.parametrize(
    ("engine", "schedule", "target"),
    covering(
        [
            (engine, *schedule)
            for engine in ("native", "horovod")
            for schedule in _SCHEDULES
        ],
        [],  # those of micro-batches, below
    ),
)
def test_two_stages(cluster, engine, schedule, target):
    ranks = cluster(engine, 2).run(
        pipeline_functions.train_in_flight,
        "momentum",
        ["dense_1"],
        schedule,
        target,
        _NUM_EXAMPLES,
    )
    _check(ranks, "momentum", 2, schedule, target)


@pytest.mark.all_cells
def test_three_stages(cluster):
    ranks = cluster("native", 3, has_groups=True).run(
        pipeline_functions.train_in_flight,
        "adam",
        ["drop", "norm"],
        "spectrain",
        "paper",
        _NUM_EXAMPLES,
    )
    _check(ranks, "adam", 3, "spectrain", "paper")


# With tables, what the forward passes of a mini-batch look up is kept.
@pytest.mark.parametrize(
    ("engine", "rule", "schedule", "target", "model", "cuts", "options"),
    [
        *_micro_batched("native", "momentum", ("vanilla", "paper"), 2, 2),
        *_micro_batched("native", "adam", ("stash", "paper"), 3, 4),
        *_micro_batched(
            *("native", "adam", ("spectrain", "paper"), 3, 2), is_usual=False
        ),
        *_micro_batched("horovod", "sgd", ("spectrain", "paper"), 2, 4),
        *_micro_batched(
            *("horovod", "momentum", ("stash", "paper"), 3, 2), is_usual=False
        ),
        *_micro_batched("native", "adam", ("spectrain", "paper"), 2, 4, True),
        *(
            pytest.param(
                *("native", "momentum", "stash", "paper"),
                *("rows line", ["dense_0"], options),
                marks=marks,
            )
            for options, marks in [
                ((3,), []),
                ((2, True), pytest.mark.all_cells),
            ]
        ),
    ],
)
def test_micro_batches(
    cluster, engine, rule, schedule, target, model, cuts, options
):
    """As the oracle does, which computes whole mini-batches.

    The last mini-batch has fewer examples than micro-batches.
    """
    num_examples = 57
    num_stages = len(cuts) + 1
    ranks = cluster(engine, num_stages, has_groups=num_stages > 2).run(
        pipeline_functions.train_in_flight,
        *(rule, cuts, schedule, target, num_examples, model, 1, *options),
    )
    check(ranks, rule, schedule, target, cuts, num_examples, model)


@pytest.mark.parametrize(
    "number", [pytest.param(1, marks=pytest.mark.all_cells), 2]
)
def test_sizes_that_differ_between_mini_batches_in_flight(cluster, number):
    """The model does not know them, and a batch has them in its messages."""
    schedule = "stash"
    ranks = cluster("native", 3, has_groups=True).run(
        length_functions.trained, "momentum", schedule, number
    )
    check_lengths(ranks, schedule)


def check_lengths(ranks, schedule, messages_ahead=False):
    """Compares what `length_functions.trained` gives with the oracle."""
    network = length_functions.made()
    stages = [
        pipeline_oracle.Stage(each, "momentum")
        for each in _layers_of(network, length_functions.CUTS)
    ]
    batches = length_functions.batches()
    losses = pipeline_oracle.train(
        stages, batches, schedule, "paper", messages_ahead
    )
    shares = [len(x) for x, _ in batches]
    for weights, history in ranks:
        for value, expected in zip(weights, network.get_weights(), strict=True):
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)
        mean = np.average(losses, weights=shares)
        np.testing.assert_allclose(history, [mean], rtol=1e-5)


def test_fewer_mini_batches_than_stages(cluster):
    """The pipeline is emptied while it still fills."""
    num_examples = 13
    ranks = cluster("native", 4, has_groups=True).run(
        pipeline_functions.train_in_flight,
        "momentum",
        ["dense_0", "norm", "dense_2"],
        "vanilla",
        "paper",
        num_examples,
    )
    network = pipeline_functions.made("line")
    stages = [
        pipeline_oracle.Stage([network.get_layer(n) for n in names], "momentum")
        for names in _STAGES[4]
    ]
    x, y = pipeline_functions.data("dense", num_examples)
    size = pipeline_functions.BATCH_SIZE
    for _ in range(2):
        batches = [
            (x[:size].astype("float64"), y[:size]),
            (x[size:].astype("float64"), y[size:]),
        ]
        pipeline_oracle.train(stages, batches, "vanilla", "paper")
    for values, *_ in ranks:
        for value, expected in zip(values, network.get_weights(), strict=True):
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("num_stages", "schedule"),
    tasks_of_runs((2, "stash")),
)
def test_a_run_has_the_tasks_of_the_schedule(cluster, num_stages, schedule):
    """While the pipeline fills, is full and empties."""
    num_steps = num_stages + 2
    ranks = cluster("native", num_stages, has_groups=True).run(
        *(pipeline_functions.recorded, num_steps, False, num_stages, schedule)
    )
    planned = without_flush(num_stages, num_steps)
    for tasks, of_stage in zip(ranks, planned.stages, strict=True):
        assert tasks == [(task.kind.value, task.batch) for task in of_stage]


def test_missed_updates_and_distances_as_they_run(cluster):
    """Equations 5 and 6, once the pipeline is full; N - k are in flight."""
    size, num_steps = 4, 9
    ranks = cluster("native", size, has_groups=True).run(
        pipeline_functions.counted, num_steps
    )
    for k, (missed, ahead) in enumerate(ranks):
        behind, beyond = size - 1 - k, k // 2
        assert missed == [min(step, behind) for step in range(num_steps)]
        if not behind:
            assert ahead == [beyond] * num_steps
            continue
        forward = [min(step, behind) + beyond for step in range(num_steps)]
        expected = forward[:behind]
        for each in forward[behind:]:
            expected += sorted([each, beyond])
            # The two passes of a step do not wait for each other.
            pair = slice(len(expected) - 2, len(expected))
            ahead[pair] = sorted(ahead[pair])
        # While the pipeline empties, to no update that is not to come.
        expected += [min(beyond, left) for left in reversed(range(behind))]
        assert ahead == expected
