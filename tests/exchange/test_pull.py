"""Rows of several tables in one exchange, and what of them travels."""

import collections
import contextlib
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.board import model_plan
from keras_sparsity.exchange.options import Options
from keras_sparsity.exchange.pull import PullNow, Request, in_turn
from keras_sparsity.exchange.together import gather_together
from keras_sparsity.health import journal
from tests import oracles
from tests.conftest import engines

# Rows, row length and partitions: all addresses fit into 16 bits, but for the
# larger table's; the last two have longer rows.
TABLES = [(1_000, 4, 3), (30, 4, 5), (3, 4, None), (900, 4, 1)]
LARGER, OF_SIX, OF_TEN = (140_000, 4, 1), (50, 6, None), (2, 10, 1)


# Which tables are asked, in turn, and for which ids outside of the second.
CASES = {
    "16 bits": (TABLES, (0, 1, 2, 3, 0), (-1, 30, 2**40, -(2**40))),
    "32 bits": ([*TABLES, LARGER], (4, 1, 2, 4), (-1, 30, 2**40, -(2**40))),
    "lengths": (
        [*TABLES, LARGER, OF_SIX, OF_TEN],
        (5, 1, 4, 6, 5, 3),
        (-1, 30, 2**40, -(2**40)),
    ),
}


def pull_together(shapes, asked, outside):
    """Rows and gradients against dense NumPy, and errors, on this rank."""
    strategy = ks.HybridStrategy(architecture="hybrid")
    ranks = strategy.collectives
    tables = [
        ks.ShardedTable(n, dim, num_partitions=count, name=f"table_{i}")
        for i, (n, dim, count) in enumerate(shapes)
    ]
    whole = [table.read() for table in tables]
    random = np.random.default_rng(strategy.rank)
    ids = [random.integers(shapes[i][0], size=(2, 3 + i)) for i in asked]
    ids[0] = ids[0][:0]  # nothing of the first request

    @tf.function
    def gather(*ids):
        with tf.GradientTape() as tape:
            rows, _ = gather_together(
                [
                    (tables[i], of, "float32")
                    for i, of in zip(asked, ids, strict=True)
                ],
                strategy.options,
            )
            loss = tf.add_n(
                [tf.reduce_sum(x) * (k + 1.0) for k, x in enumerate(rows)]
            )
        return rows, tape.gradient(loss, [t.variable for t in tables])

    rows, gradients = strategy.run(gather, args=tuple(map(tf.constant, ids)))
    for index, of_request, of_table in zip(ids, rows, asked, strict=True):
        np.testing.assert_array_equal(of_request, whole[of_table][index])
        # For plans, of float32.
        assert tables[of_table].pulled_bytes == 4 * tables[of_table].dim
    expected = [np.zeros_like(values) for values in whole]
    for of_rank in ranks.gather_objects(ids):
        for k, (i, index) in enumerate(zip(asked, of_rank, strict=True)):
            np.add.at(expected[i], index, k + 1.0)
    for i, (gradient, values) in enumerate(
        zip(gradients, expected, strict=True)
    ):
        assert (gradient is None) == (i not in asked)
        if gradient is None:
            continue
        mine = np.zeros_like(values)
        np.add.at(mine, gradient.indices.numpy(), gradient.values.numpy())
        np.testing.assert_allclose(
            sum(ranks.gather_objects(mine)), values, rtol=1e-6
        )
    messages = []
    for wrong in outside:
        bad = list(ids)
        if strategy.rank == 1:
            bad[1] = np.array([[0, wrong]])
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            strategy.run(gather, args=tuple(map(tf.constant, bad)))
        messages.append(str(error.value))
    return messages


def _places_and_cases():
    """`make test` has machines that pull together on one engine alone."""
    daily = [("horovod", 2, 1, case) for case in CASES]
    daily.append(("native", 4, 2, "lengths"))
    for size, machines in ((2, 1), (4, 1), (4, 2)):
        for engine in engines():
            for case in CASES:
                cell = (*engine.values, size, machines, case)
                rest = [pytest.mark.all_cells] * (cell not in daily)
                yield pytest.param(*cell, marks=[*engine.marks, *rest])


@pytest.mark.parametrize(
    ("engine", "size", "machines", "case"), list(_places_and_cases())
)
def test_several_tables_as_dense_numpy(engine, size, machines, case, cluster):
    shapes, asked, outside = CASES[case]
    results = cluster(engine, size, machines).run(
        pull_together, shapes, asked, outside
    )
    for messages in results:
        for message, wrong in zip(messages, outside, strict=True):
            assert "table_1" in message
            assert f"[{wrong}]" in message
            assert "[0, 30)" in message


def roles_of_a_step(num_tables, steps):
    """Calls of each role in a step; losses and predictions."""
    strategy = ks.HybridStrategy(architecture="hybrid")
    keras.utils.set_random_seed(3)
    inputs = keras.Input((num_tables, 2), dtype="int32")
    layers = [
        ks.layers.ShardedEmbedding(20 + i, 4 + 2 * (i % 3), name=f"table_{i}")
        for i in range(num_tables)
    ]
    rows = [layer(inputs[:, i]) for i, layer in enumerate(layers)]
    rows.append(layers[0](inputs[:, 0] // 2))  # called twice
    # This one's ids are known only when the model runs.
    late = ks.layers.ShardedEmbedding(9, 4, name="late")
    hidden = keras.layers.Dense(1, "sigmoid", trainable=False)(
        keras.ops.cast(inputs[:, 0], "float32")
    )
    rows.append(late(keras.ops.cast(8 * hidden, "int32")))
    frozen = ks.layers.ShardedEmbedding(20, 4, name="frozen", trainable=False)
    rows.append(frozen(inputs[:, 0]))
    flat = [keras.layers.Flatten()(x) for x in rows]
    out = keras.layers.Dense(1)(keras.layers.Concatenate()(flat))
    model = keras.Model(inputs, out)
    with strategy.scope():
        model.compile(keras.optimizers.Adagrad(0.1), "mse")
    x = np.random.default_rng(0).integers(20, size=(8 * steps, num_tables, 2))
    y = x.sum(axis=(1, 2)) / num_tables
    journal.current().measures = True
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    calls = collections.Counter()
    for (role, *_), totals in journal.current().totals().items():
        calls[role] += totals.calls
    journal.current().measures = False
    calls = {role: count / steps for role, count in calls.items()}
    return calls, history.history["loss"], model.predict(x[:8], verbose=0)


# As many as a recommender has, in `make test-all`.
@pytest.mark.parametrize(
    "num_tables", [4, pytest.param(26, marks=pytest.mark.all_cells)]
)
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_the_number_of_messages_is_that_of_one_table(
    engine, num_tables, cluster
):
    processes = cluster(engine, 2)
    one, *_ = processes.run(roles_of_a_step, 1, 3)[0]
    many, losses, predictions = processes.run(roles_of_a_step, num_tables, 3)[1]
    for name in ("late", "frozen"):
        pulled = {f"table/{name}/pull/ids", f"table/{name}/pull/rows"}
        assert pulled < set(one)
        assert (f"table/{name}/push/rows" in one) == (name == "late")
    for calls in (one, many):
        assert set(calls.values()) <= {0, 1}
    # Rows of several lengths: who pads must know the largest part.
    assert sum(many.values()) - sum(one.values()) == (engine == "native")
    assert sum(one.values()) >= 11
    # In this process alone.
    _, expected, outputs = roles_of_a_step(num_tables, 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(predictions, outputs, rtol=1e-4, atol=1e-5)


def what_pulls_wait_for():
    """Messages of two pulls, and whether the second's come behind."""
    strategy = ks.HybridStrategy(architecture="hybrid")
    first, second = (
        ks.ShardedTable(20, 4, owner_name=name) for name in ("first", "second")
    )
    found = []

    @tf.function
    def gather(ids):
        pulls = [
            PullNow([([table], ids)], strategy.options)
            for table in (first, second)
        ]
        ((a,), (b,)) = in_turn(pulls)
        found.append(oracles.messages(a))
        found.append(oracles.messages(b))
        found.append(pulls[0].sent[0].op in oracles.ancestors(b))
        return a, b

    for table, rows in zip(
        (first, second),
        strategy.run(gather, args=(tf.range(5),)),
        strict=True,
    ):
        np.testing.assert_array_equal(rows, table.read()[:5])
    of_first, of_second, is_behind = found
    return (
        len(of_first & of_second),
        len(of_first - of_second),
        len(of_second - of_first),
        is_behind,
    )


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_ids_of_all_pulls_come_before_rows_in_turn(engine, cluster):
    for shared, own, of_second, is_behind in cluster(engine, 2).run(
        what_pulls_wait_for
    ):
        assert shared >= 2  # the ids of both
        # Rows do not wait until others have come.
        assert own == of_second >= 1
        assert is_behind


# What travels.


@contextlib.contextmanager
def measured():
    """Bytes sent meanwhile, by role."""

    def totals():
        sent = collections.Counter()
        for (role, *_), found in journal.current().totals().items():
            sent[role.removeprefix("across/")] += found.sent_bytes
        return sent

    sent, before = collections.Counter(), totals()
    journal.current().measures = True
    yield sent
    journal.current().measures = False
    sent.update(totals() - before)


def send_in(wire_dtype):
    """Bytes by role and the values that one step of SGD leads to."""
    strategy = ks.HybridStrategy(architecture="hybrid", wire_dtype=wire_dtype)
    words = keras.Input((1,), dtype="int32")
    sharded = ks.layers.ShardedEmbedding(4, 8, "zeros", name="sharded")
    stock = keras.layers.Embedding(4, 8, "zeros", name="stock")
    scale = Scale()
    outputs = scale(keras.layers.Add()([sharded(words), stock(words)]))
    model = keras.Model(words, outputs)
    with strategy.scope():
        model.compile(keras.optimizers.SGD(1.0), lambda y, x: 16 * y * x)
    with measured() as sent:
        # The ranks' gradients are 256 and 1, for all rows and the kernel.
        model.fit(np.full((2, 1), 3), np.array([[256.0], [1.0]]), verbose=0)
    (stock_rows,) = stock.get_weights()
    return sent, sharded.table.read()[3], stock_rows[3], scale.kernel.numpy()


class Scale(keras.layers.Layer):
    def build(self, input_shape):
        self.kernel = self.add_weight(
            shape=input_shape[-1:], initializer="zeros", name="kernel"
        )

    def call(self, inputs):
        return inputs + self.kernel


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_sums_are_wide_and_messages_narrow(engine, cluster):
    """257 is no number of bfloat16: the sum of 256 and 1 would be 256."""
    processes = cluster(engine, 2)
    sent = {}
    for wire_dtype in (None, "float32", "float16", "bfloat16"):
        sent[wire_dtype] = collections.Counter()
        for of_rank, row, stock, kernel in processes.run(send_in, wire_dtype):
            sent[wire_dtype].update(of_rank)
            np.testing.assert_array_equal(row, -257)
            np.testing.assert_array_equal(stock, -257)
            # This sum is sent, too.
            error = 1 if wire_dtype == "bfloat16" else 0
            np.testing.assert_allclose(kernel, -257, atol=error)
    wide = sent[None]
    assert sent["float32"] == wide
    rows = [r for r in wide if r.endswith(("/rows", "/values"))]
    assert len(rows) == 3
    for narrow in (sent["float16"], sent["bfloat16"]):
        for role in rows:
            # Each rank's gathered gradient comes with an index of 16 bits; the
            # native engine pads 34 bytes to 36, and leaves 18.
            index = 4 if engine == "horovod" and "values" in role else 0
            assert 2 * (narrow[role] - index) == wide[role] - index > 0
        dense = sum(n for r, n in narrow.items() if "optimizer/dense" in r)
        assert dense < wide["optimizer/dense/float32/0"] or engine == "native"


def pull_smaller(columns, dtype):
    """Part of each row against dense NumPy, and the bytes that it takes."""
    strategy = ks.HybridStrategy(architecture="hybrid")
    table = ks.ShardedTable(60, 8, name="table")
    whole = table.read()
    random = np.random.default_rng(strategy.rank)
    ids = random.integers(60, size=(4, 10))

    @tf.function
    def gather(ids):
        with tf.GradientTape() as tape:
            rows = table.gather(ids, columns, dtype)
            loss = tf.reduce_sum(tf.cast(rows, "float32") ** 2)
        return rows, tape.gradient(loss, table.variable)

    with measured() as sent:
        rows, gradient = strategy.run(gather, args=(tf.constant(ids),))
    part = tf.cast(whole[ids][..., columns or slice(None)], dtype or "float32")
    assert rows.dtype == part.dtype and rows.shape == part.shape
    np.testing.assert_array_equal(rows, part)
    expected, mine = np.zeros_like(whole), np.zeros_like(whole)
    for of_rank in strategy.collectives.gather_objects(ids):
        part = tf.cast(whole[of_rank], dtype or "float32")
        part = tf.cast(2 * tf.cast(part, "float32"), part.dtype)
        of_columns = np.zeros_like(whole[of_rank])
        of_columns[..., columns or slice(None)] = tf.cast(part, "float32")[
            ..., columns or slice(None)
        ]
        np.add.at(expected, of_rank, of_columns)
    np.add.at(mine, gradient.indices.numpy(), gradient.values.numpy())
    if table.is_sharded:
        owner = table.layout.owner(tf.range(60)).numpy()
        assert set(owner[gradient.indices]) <= {strategy.rank}
        expected[owner != strategy.rank] = 0
    np.testing.assert_allclose(mine, expected, rtol=1e-6)
    return [sent[f"table/table/{way}/rows"] for way in ("pull", "push")]


def test_part_of_a_row_in_one_process():
    pull_smaller(slice(2, 5), "bfloat16")


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_owners_slice_and_cast_what_they_send(engine, cluster):
    processes = cluster(engine, 2)

    def sent(*args):
        return np.sum(processes.run(pull_smaller, *args), axis=0)

    pulled, pushed = sent(None, None)
    assert pulled == pushed > 0
    narrow = sent(None, "bfloat16")
    assert narrow.tolist() == [pulled / 2, pushed]
    sliced = sent(slice(-4, None), None)
    if engine == "horovod":  # the other one pads
        assert sliced.tolist() == [pulled / 2, pushed / 2]
        assert sent(slice(2, 4), "float16").tolist() == [
            pulled / 8,
            pushed / 4,
        ]
    assert sliced[0] == sliced[1] < pulled
    # By way of machines, with two processes on each.
    processes = cluster(engine, 4, 2)
    pulled, pushed = sent(slice(1, 3), "bfloat16")
    assert 0 < 2 * pulled == pushed


def embed_in(policy):
    """Bytes of pulled and pushed rows of an embedding of that policy."""
    strategy = ks.HybridStrategy(architecture="hybrid")
    words = keras.Input((2,), dtype="int32")
    rows = [
        ks.layers.ShardedEmbedding(20, 8, name=name, dtype=policy)(words)
        for name in ("first", "second")
    ]
    model = keras.Model(words, keras.layers.Add(dtype=policy)(rows))
    with strategy.scope():
        model.compile(keras.optimizers.SGD(1.0), "mse")
    with measured() as sent:
        model.fit(np.arange(16).reshape(8, 2), np.zeros((8, 2, 8)), verbose=0)
    rows = [
        sum(n for role, n in sent.items() if role.endswith(f"{way}/rows"))
        for way in ("pull", "push")
    ]
    cost = model_plan.of_running(model).variables[0].costs["ps"]
    return *rows, sum(cost.sent_bytes)


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_mixed_precision_pulls_what_it_computes_with(engine, cluster):
    processes = cluster(engine, 2)
    wide = np.sum(processes.run(embed_in, "float32"), axis=0)
    narrow = np.sum(processes.run(embed_in, "mixed_bfloat16"), axis=0)
    assert wide[0] == wide[1] > 0
    assert narrow[0] == wide[0] / 2 and narrow[1] == wide[1]
    # The plan knows of it, and of the ids.
    assert 0.7 * wide[2] < narrow[2] < 0.8 * wide[2]


# By way of machines.

MANY, WIDE = 60, 8


def pull_by_machine(together):
    """Ids, and bytes of the pulled and pushed rows that left this machine."""
    strategy = ks.HybridStrategy(
        architecture="hybrid", local_aggregation=together
    )
    table = ks.ShardedTable(MANY, WIDE, name="table")
    random = np.random.default_rng(strategy.rank)
    ids = tf.constant(random.integers(MANY, size=40))

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            rows = table.gather(ids)
            loss = tf.reduce_sum(rows * tf.stop_gradient(rows))
        return tape.gradient(loss, table.variable).values

    with measured() as sent:
        strategy.run(step, args=(ids,))
    roles = ("table/table/pull/rows", "table/table/push/rows")
    return ids.numpy(), [sent[role] for role in roles]


@pytest.mark.parametrize("engine", engines("horovod"))
def test_a_row_crosses_the_network_once_for_each_machine(engine, cluster):
    """Of four processes on two machines; Horovod's messages are not padded."""
    processes = cluster(engine, 4, 2)
    machine_of_owner = np.array([0, 1, 0, 1])  # of each partition's
    for together in (True, False):
        results = processes.run(pull_by_machine, together)
        num_rows = 0
        for rank in range(4):
            parts = [results[rank][0]]
            if together:  # the machine's first rank asks for both
                parts = [results[rank][0], results[rank ^ 1][0]][: 2 - rank % 2]
            rows = np.unique(np.concatenate(parts))
            if not (together and rank % 2):
                owner = machine_of_owner[rows % 4]
                num_rows += np.sum(owner != rank // 2)
        for sent in zip(*(sent for _, sent in results), strict=True):
            if together:
                assert sum(sent) == num_rows * WIDE * 4
            else:  # and what goes to the other process of the machine
                assert sum(sent) > num_rows * WIDE * 4


# A rank's request, of rows of several tables.

WORDS, USERS = (types.SimpleNamespace(num_rows=n) for n in (5, 3))


def request_of(*requests, merges=True):
    exchange = types.SimpleNamespace(
        groups=((WORDS,), (USERS,)),
        options=Options(merges=merges),
        addresses=types.SimpleNamespace(first_rows=[0, 5], row_dtype=tf.int32),
    )
    return Request(
        exchange,
        [([table], tf.constant(ids, dtype)) for table, ids, dtype in requests],
    )


REQUESTS = (
    (WORDS, [4, 1, 4], "int32"),
    (USERS, [0, 2], "int64"),
    (WORDS, [1], "uint8"),
    (USERS, [], "int32"),
)


@pytest.mark.parametrize("merges", [True, False])
def test_each_row_once_where_duplicates_merge(merges):
    request = request_of(*REQUESTS, merges=merges)
    request.merge()
    numbers = np.array([4, 1, 4, 5, 7, 1])
    np.testing.assert_array_equal(request.numbers, numbers)
    np.testing.assert_array_equal(
        tf.gather(request.rows, request.index), numbers
    )
    assert len(request.rows) == (4 if merges else 6)
    parts = tf.split(request.numbers, request.sizes)
    assert [part.numpy().tolist() for part in parts] == [
        [4, 1, 4],
        [5, 7],
        [1],
        [],
    ]


def test_the_ids_of_each_group():
    request = request_of(*REQUESTS)
    request.merge()
    assert sorted(request.ids_of(0).numpy()) == [1, 4]
    assert sorted(request.ids_of(1).numpy()) == [0, 2]


@pytest.mark.parametrize("wrong", [-1, 3, 2**40, -(2**40)])
def test_an_id_outside_is_found_with_its_table(wrong):
    request = request_of(
        *REQUESTS, (USERS, [1, wrong], "int64"), (WORDS, [2], "int8")
    )
    are_inside = [bool(each) for each in request.are_inside]
    assert are_inside == [True] * 4 + [False, True]
    assert request.outside().numpy().tolist() == [1, wrong]
