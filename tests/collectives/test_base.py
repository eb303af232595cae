"""One suite for every engine: local, native and horovod.

Each check runs on all ranks of a cluster and returns what it saw. What should
have come is computed here, in NumPy, from what the ranks sent.
"""

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity import collectives
from tests.conftest import HAS_HOROVOD, engines

# Engine, number of processes, number of machines they believe to be on.
CLUSTERS = [("local", 1, 1)] + [
    (engine, *shape)
    for engine in ("native", "horovod")
    for shape in ((1, 1), (2, 1), (4, 2))
]
FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
# Numbers of rows from (row) to (column); the corner of the first `size`
# ranks is used. Uneven, with empty parts and a rank that sends nothing.
SPLITS = np.array([[2, 3, 0, 1], [4, 0, 5, 2], [0, 0, 0, 0], [1, 6, 0, 70]])


@pytest.fixture(
    scope="module",
    # Two processes are a part of four on two machines.
    params=[
        pytest.param(each, marks=[pytest.mark.all_cells] * (each[1:] == (2, 1)))
        for each in CLUSTERS
    ],
    ids=lambda p: f"{p[0]}-{p[1]}x{p[2]}",
)
def ranks(request, cluster):
    engine, num_processes, machines = request.param
    if engine == "horovod" and not HAS_HOROVOD:
        pytest.skip("Horovod is not installed")
    processes = cluster(engine, num_processes, machines)
    yield processes
    if engine == "horovod":
        processes.stop()  # Its processes keep a core busy when idle.


def values(rank, shape, dtype="float32", seed=0):
    """What rank `rank` sends: whole numbers that every dtype holds."""
    random = np.random.default_rng([seed, rank, *shape])
    return random.integers(0, 12, shape).astype(
        tf.as_dtype(dtype).as_numpy_dtype
    )


def both_ways(function, *tensors):
    """`function`'s results eagerly, after a check that a graph agrees."""
    eager = [np.asarray(t.numpy()) for t in function(*tensors)]
    graph = [np.asarray(t.numpy()) for t in tf.function(function)(*tensors)]
    for one, other in zip(eager, graph, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    return eager


# Where the processes are.


def places():
    return [
        vars(collectives.current().topology),
        vars(collectives.current().group("machine").topology),
        vars(collectives.current().group("across").topology),
        collectives.current().engine,
    ]


def test_topology(ranks):
    check_places(ranks)


def check_places(ranks):
    size, machines = ranks.num_processes, ranks.machines
    local_size = size // machines
    for rank, (whole, machine, across, engine) in enumerate(ranks.run(places)):
        local_rank, cross_rank = rank % local_size, rank // local_size
        names = "rank size local_rank local_size cross_rank cross_size".split()
        expected = rank, size, local_rank, local_size, cross_rank, machines
        assert whole == dict(zip(names, expected, strict=True))
        expected = local_rank, local_size, local_rank, local_size, 0, 1
        assert machine == dict(zip(names, expected, strict=True))
        expected = cross_rank, machines, 0, 1, cross_rank, machines
        assert across == dict(zip(names, expected, strict=True))
        assert engine == ranks.engine


# all_reduce


REDUCTIONS = {
    "sum": (FLOATS + INTEGERS, np.sum),
    "mean": (FLOATS, np.mean),
    "max": (("bool", *FLOATS, *INTEGERS), np.max),
    "min": (("bool", *FLOATS, *INTEGERS), np.min),
}
SHAPES = [(), (3, 2), (0,), (5,)]


def reduce(op, dtypes):
    current = collectives.current()
    tensors = [
        values(current.rank, shape, dtype)
        for dtype in dtypes
        for shape in SHAPES
    ]
    return both_ways(
        lambda *tensors: current.all_reduce(tensors, op, "test"), *tensors
    )


@pytest.mark.parametrize("op", REDUCTIONS)
def test_all_reduce(ranks, op):
    dtypes, expected = REDUCTIONS[op]
    cases = [(dtype, shape) for dtype in dtypes for shape in SHAPES]
    for received in ranks.run(reduce, op, dtypes):
        for (dtype, shape), value in zip(cases, received, strict=True):
            sent = np.array(
                [values(r, shape, dtype) for r in range(ranks.num_processes)]
            )
            assert value.dtype == sent.dtype
            assert value.shape == shape
            right = expected(sent.astype("float64"), 0).astype(sent.dtype)
            np.testing.assert_array_equal(value, right)


def reduce_lengths(lengths):
    current = collectives.current()

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)] * 2)
    def traced(one, other):
        return current.all_reduce([one, other], name="test")

    return [
        [t.numpy() for t in traced(values(current.rank, (n,)), [1.0, 2.0])]
        for n in lengths
    ]


def test_all_reduce_of_changing_lengths(ranks):
    lengths = [3, 0, 8, 3, 1001]
    for received in ranks.run(reduce_lengths, lengths):
        for length, (value, pair) in zip(lengths, received, strict=True):
            sent = [values(r, (length,)) for r in range(ranks.num_processes)]
            np.testing.assert_array_equal(value, np.sum(sent, 0))
            np.testing.assert_array_equal(pair, np.multiply([1, 2], len(sent)))


def reduce_noise(times):
    current = collectives.current()
    random = np.random.default_rng(current.rank)
    noise = [
        tf.constant(random.normal(size=size).astype("float32"))
        for size in (10_007, 3, 501)
    ]

    @tf.function
    def traced():
        # The calls may run at the same time, in any order.
        return [current.all_reduce([value], name="test")[0] for value in noise]

    return [
        b"".join(t.numpy().tobytes() for t in traced()) for _ in range(times)
    ]


def test_all_reduce_gives_the_same_bits_each_time_and_everywhere(ranks):
    results = [bits for rank in ranks.run(reduce_noise, 30) for bits in rank]
    assert len(set(results)) == 1


def reduce_gradient(op):
    current = collectives.current()
    scale = float(current.rank + 1)

    def gradient(value):
        with tf.GradientTape() as tape:
            tape.watch(value)
            reduced, count = current.all_reduce([value, 1.0], op, "test")
            loss = tf.reduce_sum(reduced * scale) + 0.0 * count
        return [tape.gradient(loss, value)]

    return both_ways(gradient, tf.ones([2]))[0]


def test_gradient_of_all_reduce(ranks):
    total = sum(range(1, ranks.num_processes + 1))
    for op, expected in (("sum", total), ("mean", total / ranks.num_processes)):
        for gradient in ranks.run(reduce_gradient, op):
            np.testing.assert_allclose(gradient, [expected] * 2)


# all_to_all


def sent_rows(rank, size, row_shape, dtype="float32", factor=1):
    """The parts that a rank sends to each."""
    return [
        values(rank, (factor * SPLITS[rank, peer], *row_shape), dtype, peer)
        for peer in range(size)
    ]


def exchange(row_shape, dtype):
    current = collectives.current()
    rows = np.concatenate(
        sent_rows(current.rank, current.size, row_shape, dtype)
    )

    def there_and_back(rows):
        splits = SPLITS[current.rank, : current.size]
        received, route = current.all_to_all(rows, splits, "test/there")
        again = current.all_to_all_along(rows, route, "test/again")
        back = current.all_to_all_back(received, route, "test/back")
        return received, route.received_splits, again, back

    return both_ways(there_and_back, rows)


@pytest.mark.parametrize(
    "row_shape, dtype",
    [((), "int64"), ((3,), "float32"), ((2, 2), "bfloat16"), ((0,), "int32")],
)
def test_all_to_all(ranks, row_shape, dtype):
    size = ranks.num_processes
    sent = [sent_rows(r, size, row_shape, dtype) for r in range(size)]
    for rank, seen in enumerate(ranks.run(exchange, row_shape, dtype)):
        received, received_splits, again, back = seen
        expected = np.concatenate([sent[peer][rank] for peer in range(size)])
        assert received.dtype == expected.dtype
        np.testing.assert_array_equal(received, expected)
        np.testing.assert_array_equal(received_splits, SPLITS[:size, rank])
        np.testing.assert_array_equal(again, expected)
        np.testing.assert_array_equal(back, np.concatenate(sent[rank]))


def exchange_dtypes(dtypes):
    current = collectives.current()
    rank, size = current.rank, current.size

    def there(*tensors):
        return [
            current.all_to_all(rows, SPLITS[rank, :size], "test")[0]
            for rows in tensors
        ]

    return both_ways(
        there,
        *(np.concatenate(sent_rows(rank, size, (2,), d)) for d in dtypes),
    )


def test_all_to_all_of_every_dtype(ranks):
    size = ranks.num_processes
    dtypes = ("bool", *FLOATS, *INTEGERS, "uint64", "complex64")
    for rank, seen in enumerate(ranks.run(exchange_dtypes, dtypes)):
        for dtype, received in zip(dtypes, seen, strict=True):
            expected = np.concatenate(
                [sent_rows(r, size, (2,), dtype)[rank] for r in range(size)]
            )
            assert received.dtype == expected.dtype
            np.testing.assert_array_equal(received, expected)


def exchange_sizes(factors):
    current = collectives.current()

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, None], tf.float32),
            tf.TensorSpec([None], tf.int64),
        ]
    )
    def traced(rows, splits):
        received, route = current.all_to_all(rows, splits, "test")
        return received, current.all_to_all_back(received, route, "test/back")

    results = []
    for factor in factors:
        rows = np.concatenate(
            sent_rows(current.rank, current.size, (2,), factor=factor)
        )
        splits = factor * SPLITS[current.rank, : current.size]
        received, back = traced(rows, splits)
        np.testing.assert_array_equal(back, rows)
        results.append(received.numpy())
    return results


def test_all_to_all_of_changing_sizes(ranks):
    size = ranks.num_processes
    factors = [1, 0, 40, 1, 3, 0]
    for rank, results in enumerate(ranks.run(exchange_sizes, factors)):
        for factor, received in zip(factors, results, strict=True):
            expected = [
                sent_rows(peer, size, (2,), factor=factor)[rank]
                for peer in range(size)
            ]
            np.testing.assert_array_equal(received, np.concatenate(expected))


def exchange_gradients():
    current = collectives.current()
    rank, size = current.rank, current.size
    rows = np.concatenate(sent_rows(rank, size, (2,)))
    splits = SPLITS[rank, :size]
    num_received = SPLITS[:size, rank].sum()

    def gradients(rows, weights):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(rows)
            received, route = current.all_to_all(rows, splits, "test/there")
            there = tf.reduce_sum(received * weights)
            along = current.all_to_all_along(rows * rows, route, "test/along")
            along = tf.reduce_sum(along * weights)
            back = current.all_to_all_back(
                received * received, route, "test/back"
            )
            back = tf.reduce_sum(back * back)
        return [tape.gradient(loss, rows) for loss in (there, along, back)]

    weights = values(rank, (num_received, 2), seed=99)
    return both_ways(gradients, tf.constant(rows), tf.constant(weights))


def test_gradient_of_all_to_all(ranks):
    size = ranks.num_processes
    weights = [
        values(r, (SPLITS[:size, r].sum(), 2), seed=99) for r in range(size)
    ]
    parts = [
        np.split(weights[r], np.cumsum(SPLITS[: size - 1, r]))
        for r in range(size)
    ]
    for rank, (there, along, back) in enumerate(ranks.run(exchange_gradients)):
        rows = np.concatenate(sent_rows(rank, size, (2,)))
        sent_back = np.concatenate([parts[peer][rank] for peer in range(size)])
        np.testing.assert_allclose(there, sent_back)
        np.testing.assert_allclose(along, 2 * rows * sent_back)
        np.testing.assert_allclose(back, 4 * rows**3)


# all_gather, broadcast and the rest


def gather(dtypes):
    current = collectives.current()
    shape = current.rank % 3 * 2, 3
    counts = [rank % 3 * 2 for rank in range(current.size)]
    return both_ways(
        lambda *tensors: [
            *(current.all_gather(t, "test") for t in tensors),
            current.all_gather(tensors[0], "known", counts),
        ],
        *(values(current.rank, shape, dtype) for dtype in dtypes),
    )


def test_all_gather(ranks):
    dtypes = ("bool", *FLOATS, *INTEGERS, "uint64", "complex64")
    for seen in ranks.run(gather, dtypes):
        for dtype, gathered in zip((*dtypes, dtypes[0]), seen, strict=True):
            expected = np.concatenate(
                [
                    values(r, (r % 3 * 2, 3), dtype)
                    for r in range(ranks.num_processes)
                ]
            )
            assert gathered.dtype == expected.dtype
            np.testing.assert_array_equal(gathered, expected)


def gather_unequal():
    """What comes of rows of other shapes: of no rows, and of some."""
    current = collectives.current()

    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def gathered(rows):
        return current.all_gather(rows, "unequal")

    # Of a function of its own, as of another model: with the same name.
    more = tf.function(lambda rows: current.all_gather(rows, "unequal"))
    assert more(tf.ones([1, 2, 2])).shape == (current.size, 2, 2)
    rank = current.rank
    found = gathered(tf.ones([2, 3] if rank else [0, 5])).numpy()
    with pytest.raises(tf.errors.OpError) as raised:
        gathered(tf.ones([1, 2 + rank]))
    return found, str(raised.value)


def test_rows_of_other_shapes_end_all_ranks(cluster):
    """Horovod has an error of its own."""
    for found, message in cluster("native", 2).run(gather_unequal, timeout=60):
        np.testing.assert_array_equal(found, np.ones([2, 3]))
        assert "[1 2][1 3]" in message.replace("\n", "")
        assert "Pad them" in message


def gather_gradient(counts=None):
    current = collectives.current()
    rank, size = current.rank, current.size
    weights = values(rank, (size * (size + 1) // 2, 2))

    def gradient(rows):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            gathered = current.all_gather(rows, "test", counts)
            loss = tf.reduce_sum(gathered * weights)
        return [tape.gradient(loss, rows)]

    return both_ways(gradient, tf.ones([rank + 1, 2]))[0]


def test_gradient_of_all_gather(ranks):
    size = ranks.num_processes
    rows = size * (size + 1) // 2
    total = np.sum([values(r, (rows, 2)) for r in range(size)], 0)
    starts = np.cumsum(range(1, size))
    for counts in (None, list(range(1, size + 1))):
        for gradient, expected in zip(
            ranks.run(gather_gradient, counts),
            np.split(total, starts),
            strict=True,
        ):
            np.testing.assert_allclose(gradient, expected)


def broadcast(root):
    current = collectives.current()
    tensors = [
        values(current.rank, shape, dtype)
        for dtype in ("bool", "uint8", "bfloat16", "float32")
        for shape in ((), (0,), (2, 3))
    ]
    return both_ways(
        lambda *tensors: current.broadcast(tensors, root, "test"), *tensors
    )


def test_broadcast(ranks):
    for root in range(ranks.num_processes):
        expected = [
            values(root, shape, dtype)
            for dtype in ("bool", "uint8", "bfloat16", "float32")
            for shape in ((), (0,), (2, 3))
        ]
        for received in ranks.run(broadcast, root):
            for value, right in zip(received, expected, strict=True):
                assert value.dtype == right.dtype
                np.testing.assert_array_equal(value, right)


def objects():
    current = collectives.current()
    gathered = current.gather_objects({"rank": current.rank, "x": "y" * 500})
    return gathered, int(current.barrier())


def test_gather_objects_and_barrier(ranks):
    size = ranks.num_processes
    expected = [{"rank": r, "x": "y" * 500} for r in range(size)]
    assert ranks.run(objects) == [(expected, size)] * size


def check_ranks_equal():
    current = collectives.current()
    current.check_equal("same", "The word")
    try:
        current.check_equal(current.rank, "The rank", fix="Use one process.")
    except ValueError as error:
        return str(error)
    return None


def test_check_equal_lists_every_rank(ranks):
    for message in ranks.run(check_ranks_equal):
        if ranks.num_processes == 1:
            assert message is None
            continue
        assert message.startswith("The rank must be the same on all ranks.")
        assert message.endswith("Use one process.")
        for rank in range(ranks.num_processes):
            assert f"rank {rank}: {rank}" in message


# Groups


def group_work(name):
    current = collectives.current()
    group = current.group(name)

    def work(value):
        total = group.all_reduce([value], name="test")[0]
        rows = tf.fill([group.size], value)
        received, _ = group.all_to_all(rows, tf.ones([group.size], tf.int32))
        first = group.broadcast([value], 0, name="test")[0]
        # The whole and the group at once, in one function.
        whole = current.all_reduce([value], name="test")[0]
        return total, received, first, group.all_gather([value]), whole

    return both_ways(work, tf.constant(float(current.rank)))


@pytest.mark.parametrize("name", collectives.base.GROUPS)
def test_groups(ranks, name):
    check_group(ranks, name)


def check_group(ranks, name):
    size = ranks.num_processes
    local_size = size // ranks.machines
    for rank, seen in enumerate(ranks.run(group_work, name)):
        total, received, first, gathered, whole = seen
        if name == "machine":
            start = rank // local_size * local_size
            members = list(range(start, start + local_size))
        else:
            members = list(range(rank % local_size, size, local_size))
        assert total == sum(members)
        assert received.tolist() == members
        assert first == members[0]
        assert gathered.tolist() == members
        assert whole == sum(range(size))


def _engines_and_machines():
    """All have two processes on a machine, but for one; and `make test-all`."""
    for engine in engines():
        for machines in (1, 4):
            marks = list(engine.marks)
            if (*engine.values, machines) != ("native", 4):
                marks.append(pytest.mark.all_cells)
            yield pytest.param(*engine.values, machines, marks=marks)


@pytest.mark.parametrize(("engine", "machines"), list(_engines_and_machines()))
def test_four_processes_on_one_and_on_four_machines(engine, machines, cluster):
    ranks = cluster(engine, 4, machines)
    check_places(ranks)
    for name in collectives.base.GROUPS:
        check_group(ranks, name)
    ranks.stop()


# How programs use them


def loop(steps):
    """As Keras's loop over `steps_per_execution`: a traced step in a loop."""
    current = collectives.current()
    rank, size = current.rank, current.size

    @tf.function
    def step(index):
        # Nothing here depends on the step before.
        rows = tf.repeat(index * size + rank, (index % 3 + rank) * size)
        splits = tf.fill([size], index % 3 + rank)
        received, route = current.all_to_all(rows, splits, "test/there")
        back = current.all_to_all_back(received, route, "test/back")
        total, *_ = current.all_reduce([index * size + rank], name="test")
        is_right = tf.reduce_all(tf.equal(back, rows))
        return tf.reduce_sum(received), total, is_right

    @tf.function
    def many_steps(count):
        received = tf.TensorArray(tf.int32, count)
        totals = tf.TensorArray(tf.int32, count)
        are_right = True
        for index in tf.range(count):
            sum_received, total, is_right = step(index)
            received = received.write(index, sum_received)
            totals = totals.write(index, total)
            are_right = tf.logical_and(are_right, is_right)
        return received.stack(), totals.stack(), are_right

    return [t.numpy() for t in many_steps(tf.constant(steps))]


def test_steps_in_a_while_loop(ranks):
    size, steps = ranks.num_processes, 60
    every = range(size)
    for received, totals, are_right in ranks.run(loop, steps):
        assert are_right
        for index in range(steps):
            assert totals[index] == sum(index * size + r for r in every)
            assert received[index] == sum(
                (index * size + r) * (index % 3 + r) for r in every
            )


def loop_gradient():
    current = collectives.current()
    splits = tf.ones([current.size], tf.int32)

    @tf.function
    def gradient(rows):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            value = rows
            for _ in tf.range(5):
                value, _ = current.all_to_all(value * 2.0, splits, "test")
                value = tf.ensure_shape(value, rows.shape)
            loss = tf.reduce_sum(value * value)
        return tape.gradient(loss, rows)

    return gradient(values(current.rank, (current.size, 2))).numpy()


def test_gradient_through_a_while_loop(ranks):
    size = ranks.num_processes
    for rank, gradient in enumerate(ranks.run(loop_gradient)):
        rows = values(rank, (size, 2))
        # Five exchanges of one row each are one transposition of the ranks.
        np.testing.assert_allclose(gradient, 2 * 4.0**5 * rows)


def trace_alone():
    """The last rank's batches have another size, so that it traces anew."""
    current = collectives.current()
    is_last = current.rank == current.size - 1
    traces = []

    @tf.function
    def step(rows):
        traces.append(rows.shape)
        splits = tf.fill([current.size], tf.shape(rows)[0] // current.size)
        for _ in range(2):
            with tf.GradientTape() as tape:
                tape.watch(rows)
                rows_there, _ = current.all_to_all(rows, splits, "test")
                loss = tf.reduce_sum(rows_there * rows_there)
            gradient = tape.gradient(loss, rows)
        return current.all_reduce([tf.reduce_sum(gradient)], name="total")[0]

    sizes = [64, 64, 32, 64, 48] if is_last else [64] * 5
    totals = [float(step(tf.ones([n * current.size]))) for n in sizes]
    return len(traces), totals


def test_one_rank_traces_alone(ranks):
    size = ranks.num_processes
    results = ranks.run(trace_alone)
    expected = [
        2.0 * size * (64 * (size - 1) + last) for last in (64, 64, 32, 64, 48)
    ]
    for rank, (num_traces, totals) in enumerate(results):
        assert totals == expected
        assert (num_traces > 1) == (rank == size - 1)


def prune():
    """On rank 0 only, results are unused, inputs constant, calls equal."""
    current = collectives.current()
    is_first = current.rank == 0
    ones = tf.ones([current.size], tf.int32)

    @tf.function
    def traced(value):
        sent = tf.ones([current.size]) if is_first else value
        first = current.all_reduce([sent], name="test")[0]
        second = current.all_reduce([sent], name="test")[0]
        received, route = current.all_to_all(sent, ones, name="test")
        current.all_to_all_back(sent, route, name="test")
        current.all_gather(sent, name="test")
        current.broadcast([sent], name="test")
        if is_first:
            return value
        return first + second + received

    value = tf.ones([current.size])
    return [float(tf.reduce_sum(traced(value))) for _ in range(3)]


def test_nothing_is_pruned_folded_or_merged_on_one_rank(ranks):
    size = ranks.num_processes
    for rank, sums in enumerate(ranks.run(prune)):
        assert sums == [size if rank == 0 else size * (2 * size + 1.0)] * 3


def many_at_once():
    current = collectives.current()

    @tf.function
    def traced(value):
        return [
            current.all_reduce([value + i], name=f"test{i % 3}")[0]
            for i in range(20)
        ]

    return [float(t) for t in traced(tf.constant(0.0))]


def test_independent_calls(ranks):
    expected = [float(i * ranks.num_processes) for i in range(20)]
    assert ranks.run(many_at_once) == [expected] * ranks.num_processes


def seeds():
    return tf.compat.v1.get_seed(0)[0]


def test_ranks_share_a_seed(ranks):
    assert len(set(ranks.run(seeds))) == 1
