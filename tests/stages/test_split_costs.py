"""Costs of splits with tables, on machines of several processes."""

import dataclasses

import keras
import pytest

import keras_sparsity as ks
from keras_sparsity.planning import Cluster
from keras_sparsity.stages import timing
from keras_sparsity.stages.column_split import (
    ColumnSize,
    chosen_calls,
    column_sizes,
    why_not,
)
from keras_sparsity.stages.cutting import Cutter
from keras_sparsity.stages.layer_placement import LayerSize
from keras_sparsity.stages.profile import (
    GradientSize,
    OwnedRows,
    Profile,
    gradient_sizes,
)
from keras_sparsity.stages.split_costs import split_costs

# 100 bytes of rows of an example; then weights of 1,000 and 4,000 bytes.
GRADIENTS = (
    GradientSize(example_bytes=100, table_bytes=1_500),
    GradientSize(1_000),
    GradientSize(4_000),
)
PROFILE = Profile(
    tuple("abc"),
    tuple(LayerSize("dense", 1, 1) for _ in "abc"),
    (1.0, 1.0, 2.0),
    8,
    {0: 50, 1: 5},
    GRADIENTS,
)
RATE = 8e-3  # in Mbit/s: a byte takes a millisecond


def test_rows_of_tables_in_the_head_are_gathered():
    first, second = split_costs(PROFILE, 3, 1, num_examples=24)
    # 8 examples of each of 3.
    assert first.busiest_bytes == max(3 * 8 * 50, 8 * 50 + 2 * 800)
    assert second.busiest_bytes == 8 * 5 + 2 * 800 + 2 * 1_000 * 2 / 3
    assert second.head_bytes == 1_500 + 1_000
    # Of many examples, not more than the table.
    first, _ = split_costs(PROFILE, 3, 1, num_examples=240)
    assert first.busiest_bytes == max(3 * 80 * 50, 80 * 50 + 2 * 1_500)


def test_messages_within_a_machine_do_not_count():
    cluster = Cluster(2, 2, megabits_per_second=RATE)
    _, second = split_costs(PROFILE, 3, 1, 24, cluster)
    # Two workers of the first machine send to the tail on the second; the ring
    # of three leaves each machine once.
    ring = 2 * 800 + 2 * 1_000 * 2 / 3
    assert second.busiest_bytes == pytest.approx(2 * 8 * 5 + ring)
    # Two processes share a machine's computation.
    passes = 2.0 * 2 + 2.0 * 3
    travels = 1e-3 * (2 * 2 * 8 * 5 + ring)
    assert second.seconds == pytest.approx(passes + travels)
    assert second.link_seconds == pytest.approx(travels)


def test_three_workers_of_two_tails():
    _, second = split_costs(PROFILE, 3, 2, num_examples=24)
    # The busier tail has two of them; tails sum 4,000 bytes.
    assert second.busiest_bytes == 2 * 8 * 5 + 4_000


def test_two_tails_of_a_worker():
    _, second = split_costs(PROFILE, 1, 2, num_examples=24)
    # Each has half of its examples.
    assert second.busiest_bytes == 12 * 5 + 4_000
    free = Cluster(3, message_seconds=0.5, megabits_per_second=8e6)
    (_, with_messages), (_, second) = (
        split_costs(PROFILE, 1, 2, 24, cluster)
        for cluster in (free, Cluster(3, megabits_per_second=8e6))
    )
    # Activations and gradients: of the worker two messages each way, of a tail
    # one; then the tails' sum, with one out and one in.
    assert with_messages.seconds - second.seconds == pytest.approx(
        0.5 * (2 * 2 + 2 + 2)
    )


def test_gradients_of_a_model():
    rows = keras.layers.Embedding(70_000, 4, name="rows")
    regularized = keras.layers.Embedding(
        10, 4, embeddings_regularizer="l2", name="regularized"
    )
    ids = keras.Input((3,), dtype="int32")
    x = keras.layers.Concatenate(name="both")([rows(ids), regularized(ids)])
    x = keras.layers.Flatten(name="flat")(x)
    half = keras.layers.Dense(2, name="half", dtype="float16")(x)
    cutter = Cutter(keras.Model(ids, half))
    found = dict(
        zip(
            [call.operation.name for call in cutter.calls],
            gradient_sizes(cutter),
            strict=True,
        )
    )
    # A row and its number, in 4 bytes: there are more than 65,535.
    assert found["rows"].example_bytes == 3 * (4 * 4 + 4)
    assert found["rows"].table_bytes == 70_000 * 16
    assert found["regularized"] == GradientSize(10 * 16)
    assert found["half"] == GradientSize(2 * (24 * 2 + 2))
    assert found["flat"].parameter_bytes == 0


def test_tables_that_are_called_twice_or_frozen():
    ids = keras.Input((3,), dtype="int32")
    twice = ks.layers.ShardedEmbedding(50, 4, name="twice")
    frozen = ks.layers.ShardedEmbedding(70, 4, name="frozen")
    rows = [twice(ids), twice(ids[:, :2]), frozen(ids)]
    x = keras.layers.Concatenate(axis=1, name="all")(rows)
    model = keras.Model(ids, keras.layers.Dense(1, name="out")(x))
    frozen.trainable = False
    cutter = Cutter(model)
    of_calls = {}
    for call, found in zip(cutter.calls, gradient_sizes(cutter), strict=True):
        if call.operation in (twice, frozen):
            of_calls.setdefault(call.name, []).append(found)
    first, second = of_calls["twice"]
    (of_frozen,) = of_calls["frozen"]
    assert first.parameter_bytes == 50 * 4 * 4
    assert second.parameter_bytes == of_frozen.parameter_bytes == 0
    # Rows travel for each call, with a number of 2 bytes; their gradients do
    # if they are trained.
    assert first.owned_bytes(4) == 4 * 3 * (2 + 16 + 16)
    assert second.owned_bytes(4) == 4 * 2 * (2 + 16 + 16)
    assert of_frozen.owned_bytes(4) == 4 * 3 * (2 + 16)


def test_narrow_activations_and_numbers():
    x = inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Reshape((3, 2), name="ids", dtype="int32")(x)
    x = keras.layers.Embedding(10, 4, name="rows")(x)
    x = keras.layers.Flatten(name="flat")(x)
    cutter = Cutter(keras.Model(inputs, keras.layers.Dense(1)(x)))
    sizes = timing.crossing_bytes(cutter, 2, "bfloat16")
    assert list(sizes.values()) == [2 * 6 * 4, 2 * 24 * 2, 2 * 24 * 2]
    floats = timing.crossing_bytes(cutter, 2, only_floats=True)
    assert list(floats.values()) == [0, 2 * 24 * 4, 2 * 24 * 4]


def test_rows_of_sharded_tables_travel_to_and_from_their_owners():
    # 8 bytes and a number of 2, and twice as much back and forth.
    owned = OwnedRows("table", 200, 1_600, 2, 8, 8)
    gradients = (GradientSize(owned=(owned,)), *GRADIENTS[1:])
    profile = dataclasses.replace(PROFILE, gradients=gradients)
    first, _ = split_costs(profile, 3, 1, num_examples=24)
    assert first.row_bytes == 16 * 18
    assert first.head_bytes == 1_600
    assert first.star_bytes == 3 * 8 * 50
    assert first.busiest_bytes == 3 * 8 * 50
    slow = dataclasses.replace(profile, crossing_bytes={0: 0})
    (first,) = split_costs(slow, 3, 1, num_examples=24)
    assert first.busiest_bytes == pytest.approx(16 * 18 * 2 / 3)
    # Of many examples, not more than the table.
    (first,) = split_costs(slow, 3, 1, num_examples=24_000)
    assert first.row_bytes == 200 * 18
    # Two of three workers share a machine: half of the others' rows leave it.
    cluster = Cluster(2, 2, megabits_per_second=RATE, latency_seconds=10.0)
    (first,) = split_costs(slow, 3, 1, 24, cluster)
    assert first.busiest_bytes == pytest.approx(2 * 16 * 18 / 3)
    # Three messages, and four hops of the sum of what is not there.
    assert first.link_seconds == pytest.approx(
        7 * 10 + 1e-3 * first.busiest_bytes
    )


def test_columns_of_two_tails():
    # The last call's kernel, of 3,600 bytes; of an example 7 bytes to 3.
    size = ColumnSize(3_600, 7, 3)
    profile = dataclasses.replace(PROFILE, columns=(None, None, size))
    places = split_costs(profile, 2, 2, num_examples=24)
    batch = split_costs(profile, 2, 2, num_examples=24, tail_split="batch")
    assert [cost.tail_split for cost in places] == ["columns"] * 2
    # Workers send activations, rows, and sums of the second call's gradients.
    of_worker = 12 * 50 + 12 * 100, 12 * 5 + 12 * 100 + 1_000
    for place, arriving, rest in ((0, 50, 1_400), (1, 5, 400)):
        found, of_batch = places[place], batch[place]
        assert of_batch.tail_split == "batch"
        tail = 5_000 - 1_000 * place
        assert of_batch.busiest_bytes == 12 * arriving + tail
        # To the other tail: its workers' activations, half of the outputs,
        # gradients of inputs and of all but the kernel.
        to_other = 12 * arriving + 12 * 3 + 24 * 7 + rest
        of_tail = 12 * arriving + to_other
        assert found.busiest_bytes == max(of_tail, of_worker[place])
    # Each computes the whole batch, of the last call half.
    passes = (1.0 * 24 / 2 + (1.0 + 2.0 / 2) * 24) / 8
    first, _ = split_costs(profile, 2, 2, num_examples=24)
    assert first.seconds == pytest.approx(passes)
    # Of many examples, gradients of the kernel are less.
    first, _ = split_costs(profile, 2, 2, num_examples=24_000)
    assert first.tail_split == "batch"
    # Of the kernel, nine tenths of the weights, each updates a half.
    slow = dataclasses.replace(profile, update_seconds=(0.0, 1.0, 4.0))
    first, _ = split_costs(slow, 2, 2, num_examples=24)
    assert first.seconds == pytest.approx(passes + 1.0 + 4.0 * (0.1 + 0.9 / 2))


def extra_seconds(profile, *args, **options):
    """Seconds that processors take for messages, of each place.

    Of an empty one 10 s, and of a byte a hundredth.
    """
    size = args[0] + args[1]
    free, counted = (
        split_costs(profile, *args, 24, Cluster(size, **times), **options)
        for times in (
            {},
            {"message_seconds": 10.0, "message_seconds_per_byte": 0.01},
        )
    )
    for without, found in zip(free, counted, strict=True):
        assert found.link_seconds == without.link_seconds
    return [
        found.seconds - without.seconds
        for without, found in zip(free, counted, strict=True)
    ]


def test_messages_take_the_time_of_processors():
    _, second = extra_seconds(PROFILE, 3, 1)
    # A worker sends and receives 40 bytes; the tail does so of three.
    ring = 2 * 800 + 2 * 1_000 * 2 / 3
    fan = (1 + 3) * 2 * (10 + 0.4)
    assert second == pytest.approx(fan + 2 * (10 + 0.01 * ring))
    # The head's sums go through the tail.
    _, second = extra_seconds(PROFILE, 3, 1, is_star=True)
    fan = (1 + 3) * (4 * 10 + 2 * 0.01 * 1_040)
    assert second == pytest.approx(fan + 2 * (10 + 0.01 * 2 * 800))
    # Rows of sharded tables: numbers, rows and gradients.
    owned = OwnedRows("table", 200, 1_600, 2, 8, 8)
    gradients = (GradientSize(owned=(owned,)), *GRADIENTS[1:])
    sharded = dataclasses.replace(PROFILE, gradients=gradients)
    _, second = extra_seconds(sharded, 3, 1)
    fan = (1 + 3) * 2 * (10 + 0.4)
    sums = 16 * 18 * 2 / 3 + 2 * 1_000 * 2 / 3
    assert second == pytest.approx(fan + 2 * (4 * 10 + 0.01 * sums))


def test_columns_take_the_time_of_processors():
    size = ColumnSize(3_600, 7, 3)
    profile = dataclasses.replace(PROFILE, columns=(None, None, size))
    first, _ = extra_seconds(profile, 2, 2, tail_split="columns")
    # Activations, outputs, gradients of inputs, and of the other weights.
    to_other = 12 * 50 + 12 * 3 + 24 * 7 + 1_400
    fan = (1 + 1) * 2 * (10 + 0.01 * 600)
    assert first == pytest.approx(fan + 2 * (4 * 10 + 0.01 * to_other))


class Reader(keras.layers.Layer):
    """Computes with another layer's whole kernel."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, inputs):
        return keras.ops.matmul(inputs, self.layer.kernel)


class Centered(keras.optimizers.SGD):
    """Looks at a whole gradient."""

    def update_step(self, gradient, variable, learning_rate):
        gradient = gradient - keras.ops.mean(gradient)
        super().update_step(gradient, variable, learning_rate)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (None, None),
        (keras.optimizers.Adam(global_clipnorm=1.0), None),
        (keras.optimizers.SGD(clipnorm=1.0), "clipnorm=1.0 needs"),
        (keras.optimizers.Lamb(), "Lamb needs whole kernels"),
        (Centered(), "Centered may need whole kernels"),
    ],
)
def test_optimizers_that_update_no_columns(optimizer, reason):
    found = why_not(optimizer)
    assert found is None if reason is None else reason in found
    # Whoever asks for columns knows the own rule.
    assert "may" in (found or "may") or why_not(optimizer, True) == found
    assert why_not(Centered(), is_asked=True) is None


def test_layers_that_have_columns():
    x = inputs = keras.Input((5,))
    kinds = {
        "plain": {},
        "narrow": {"units": 1},
        "regular": {"kernel_regularizer": "l2"},
        "bounded": {"kernel_constraint": "non_neg"},
        "frozen": {"trainable": False},
    }
    for name, options in kinds.items():
        x = keras.layers.Dense(name=name, **{"units": 6, **options})(x)
    twice = keras.layers.Dense(6, name="twice")
    x = twice(twice(x))
    read = keras.layers.Dense(6, name="read")
    x = Reader(read)(read(x))
    cutter = Cutter(keras.Model(inputs, x))
    sizes = column_sizes(cutter.calls)
    assert column_sizes(cutter.calls, keras.optimizers.Lamb()) == ()
    found = {
        call.name: size
        for call, size in zip(cutter.calls, sizes, strict=True)
        if size
    }
    assert found == {
        "plain": ColumnSize(4 * 30, 20, 24),
        "narrow": ColumnSize(4 * 6, 24, 4),
    }
    # 240 bytes of sums for 64 of each example; else the widest.
    assert chosen_calls(sizes, 3) == {0}
    assert chosen_calls(sizes, 4) == {0}
    assert chosen_calls([None, found["narrow"]], 1) == {1}
    assert chosen_calls([None], 1) == set()


def test_a_tail_worker_sums_the_gradients_of_the_head():
    cluster = Cluster(4, megabits_per_second=RATE)
    costs = split_costs(PROFILE, 3, 1, 24, cluster, is_star=True)
    first, second = costs
    # As much back; rows are gathered among the workers.
    assert first.busiest_bytes == max(3 * 8 * 50, 8 * 50 + 2 * 800)
    assert second.busiest_bytes == 3 * (8 * 5 + 1_000)
    both_ways = 2 * second.busiest_bytes
    assert second.link_seconds == pytest.approx(1e-3 * (both_ways + 2 * 800))
    # Two tails sum them by AllReduce, as their own.
    _, second = split_costs(PROFILE, 4, 2, num_examples=32, is_star=True)
    assert second.busiest_bytes == 2 * (8 * 5 + 1_000) + 1_000 + 4_000
    # One worker has nothing to sum.
    _, second = split_costs(PROFILE, 1, 1, num_examples=8, is_star=True)
    assert second.busiest_bytes == 8 * 5
