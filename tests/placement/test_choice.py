"""The placements of each architecture, by the messages of a step."""

import collections
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.board import model_plan
from keras_sparsity.callbacks import architecture_logger
from keras_sparsity.health import journal
from keras_sparsity.placement import choice
from keras_sparsity.placement.base import Update
from tests.conftest import engines

ROWS, DIM, BATCH, STEPS = 600, 16, 16, 18
HIDDEN = (40, 24)


def ids():
    random = np.random.default_rng(4)
    return random.integers(ROWS // 30, size=(STEPS * BATCH, 8)) * 30


def train(architecture, bucket_bytes=None):
    """The plan, what was counted for each kind of call in a step, the loss."""
    strategy = ks.HybridStrategy(
        architecture=architecture, bucket_bytes=bucket_bytes
    )
    words = keras.Input((8,), dtype="int64")
    sharded = ks.layers.ShardedEmbedding(ROWS, DIM, name="sharded")(words)
    stock = keras.layers.Embedding(ROWS, DIM, name="stock")(words)
    hidden = keras.layers.Concatenate()([sharded, stock])
    hidden = keras.layers.GlobalAveragePooling1D()(hidden)
    for units in HIDDEN:
        hidden = keras.layers.Dense(units, use_bias=False)(hidden)
    model = keras.Model(words, hidden)
    with strategy.scope():
        model.compile("adagrad", "mse")
    x, y = ids(), np.ones((len(ids()), HIDDEN[-1]), "float32")
    journal.current().measures = True
    losses = model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history
    totals = collections.Counter()
    for (role, *_), found in journal.current().totals().items():
        if role.startswith(("table/", "tables/", "optimizer/")):
            totals[role] += found.sent_bytes + found.received_bytes
    journal.current().measures = False
    plan = {
        v.sparsity.name.split("/")[0]: (
            v.architecture,
            v.costs[v.architecture].total_bytes[strategy.rank],
        )
        for v in model_plan.of_running(model).variables
    }
    in_step = {role: total / STEPS for role, total in totals.items()}
    return plan, in_step, losses["loss"]


PULLED = "/pull/rows"
DENSE = 4 * (2 * DIM * HIDDEN[0] + HIDDEN[0] * HIDDEN[1])


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_each_travels_as_the_strategy_says(engine, cluster):
    processes = cluster(engine, 2)
    rows, losses = {}, {}
    of_tables = {"hybrid": "ps", "ps": "ps", "naive_ps": "ps"}
    for name in ("hybrid", "ps", "naive_ps", "allgather", "allreduce"):
        *results, losses[name] = zip(*processes.run(train, name), strict=True)
        results = list(zip(*results, strict=True))
        of_rows = name if name in ("allreduce", "ps") else "allgather"
        of_dense = "ps" if name in ("ps", "naive_ps") else "allreduce"
        counted = collections.Counter()
        for plan, totals in results:
            found = {key: way for key, (way, _) in plan.items()}
            assert found.pop("sharded") == of_tables.get(name, name)
            assert found.pop("stock") == of_rows
            assert set(found.values()) == {of_dense}
            for role, num_bytes in totals.items():
                path = architecture_logger.path_of(role)
                counted[path] += num_bytes
                counted[f"{path} of dense"] += (
                    num_bytes if role.startswith("optimizer/servers/") else 0
                )
            served = [r for r in totals if r.startswith("optimizer/servers/")]
            num_messages = {"ps": 2, "naive_ps": 2 * len(HIDDEN)}
            assert len(served) == num_messages.get(name, 0)
            reduced = [r for r in totals if r.startswith("optimizer/dense/")]
            assert len(reduced) == (of_dense == "allreduce")
        if of_dense == "ps":
            # Half of each gradient there, and half of each sum back: sent by
            # one, received by the other. One server pads to the whole.
            once = DENSE * 2
            if name == "naive_ps" and engine == "native":
                once *= 2
            for path in ("push of dense", "pull of dense"):
                assert once <= counted[path] <= once * 1.125
            planned = sum(
                cost
                for plan, _ in results
                for key, (_, cost) in plan.items()
                if key not in ("sharded", "stock")
            )
            # In one message, gradients are padded together.
            close = 0.125 if name == "ps" and engine == "native" else 1e-6
            assert counted["push of dense"] * 2 == pytest.approx(
                planned, rel=close
            )
        rows[name] = sum(
            num_bytes
            for _, totals in results
            for role, num_bytes in totals.items()
            if role.endswith(PULLED)
        )
        np.testing.assert_allclose(losses[name], losses["hybrid"], rtol=1e-5)
    # Each id for itself, or each row once.
    repeated = ids().reshape(STEPS, 2, -1)
    unique = np.mean([[len(np.unique(p)) for p in step] for step in repeated])
    assert rows["hybrid"] > 0 == rows["allgather"]
    close = 0.3 if engine == "native" else 0.05
    # Those of the ordinary embedding, too, which are as many.
    assert rows["ps"] / rows["hybrid"] == pytest.approx(2, rel=close)
    assert rows["naive_ps"] / rows["hybrid"] == pytest.approx(
        repeated.shape[-1] / unique, rel=close
    )


def planned_on_servers():
    """Bytes of a kernel on servers, where it is all-reduced."""
    with ks.HybridStrategy().scope():
        dense = keras.layers.Dense(60, use_bias=False)
        model = keras.Sequential([keras.Input((100,)), dense])
        model.compile("sgd", "mse")
    (kernel,) = model_plan.of_running(model).variables
    return kernel.costs["ps"].busiest_bytes


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_servers_take_turns_beside_tables(engine, cluster):
    processes = cluster(engine, 3)
    results = processes.run(train, "naive_ps")
    found = set()
    for plan, totals, _ in results:
        planned = sum(
            cost
            for key, (_, cost) in plan.items()
            if key not in ("sharded", "stock")
        )
        counted = sum(
            num_bytes
            for role, num_bytes in totals.items()
            if role.startswith("optimizer/servers/")
        )
        assert counted == pytest.approx(planned)
        found.add(counted)
    (kernel,) = set(processes.run(planned_on_servers))
    # Of each part a process sends two, and its sum to two.
    padded = 2_048 / 2_000 if engine == "native" else 1
    assert kernel == pytest.approx(padded * 2 * 2 * 2 * 4 * 6_000 / 3)
    # Unless padded, servers of larger gradients send and receive more.
    assert len(found) == (3 if engine == "horovod" else 1)


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_dense_gradients_go_in_buckets(engine, cluster):
    processes = cluster(engine, 2)
    one, several = (
        processes.run(train, "hybrid", limit)[0]
        for limit in (None, 4 * HIDDEN[0] * HIDDEN[1])
    )
    reduced = [r for r in several[1] if r.startswith("optimizer/dense/")]
    assert len(reduced) == len(HIDDEN)
    assert sum(several[1][r] for r in reduced) == pytest.approx(
        one[1]["optimizer/dense/float32/0"], rel=0.01
    )
    assert several[2] == one[2]


def test_unknown_ones_are_refused():
    with pytest.raises(
        ValueError, match="one of 'auto', 'measured'.*'servers'"
    ):
        ks.HybridStrategy(architecture="servers")
    assert ks.HybridStrategy().architecture == "auto"


MEBIBYTE = 2**20


@pytest.mark.parametrize(
    ("architecture", "size", "num_bytes", "is_owned"),
    [
        ("auto", 2, 16 * MEBIBYTE, False),
        ("auto", 2, 16 * MEBIBYTE + 4, True),
        ("auto", 1, 17 * MEBIBYTE, False),
        ("ps", 2, 4, True),
        ("hybrid", 2, 17 * MEBIBYTE, False),
    ],
)
def test_embeddings_that_begin_as_tables(
    architecture, size, num_bytes, is_owned
):
    communicator = types.SimpleNamespace(size=size, num_servers=0)
    placements = choice.Placements(architecture, communicator, None, None)
    assert placements.owns_rows_of(num_bytes) == is_owned


@pytest.mark.parametrize("architecture", choice.ARCHITECTURES)
def test_placements_that_fit_finds(architecture):
    """All, or those of tables that ask for it."""
    is_auto = architecture in ("auto", "measured")
    placements = ks.HybridStrategy(architecture=architecture).placements
    assert placements.finds_rows == is_auto
    assert placements.is_found(keras.Variable(np.zeros((4, 2)))) == is_auto
    for asked, is_found in [(None, is_auto), ("auto", True), ("ps", False)]:
        table = ks.ShardedTable(4, 2, architecture=asked)
        assert placements.is_found(table.variable) == is_found


def test_measured_times_choose_under_one_alone():
    assert ks.HybridStrategy(architecture="measured").placements.measures_times
    for name in choice.ARCHITECTURES.keys() - {"measured"}:
        assert not ks.HybridStrategy(
            architecture=name
        ).placements.measures_times


def test_rows_of_an_embedding_may_be_owned_others_not():
    placements = ks.HybridStrategy(architecture="auto").placements
    variable = keras.Variable(np.zeros((4, 2)))
    assert placements.candidates(variable).keys() == {"allreduce", "allgather"}
    choice.may_be_owned(variable, True)
    assert "ps" in placements.candidates(variable)
    choice.may_be_owned(variable, False)
    assert "ps" not in placements.candidates(variable)


def test_outside_of_any_strategy():
    placements = choice.entered()
    assert not placements.is_of_strategy
    others = ks.HybridStrategy().placements
    with choice.entering(others):
        assert choice.entered() is others
    assert choice.entered() is not others
    assert placements.name_of_table(ks.ShardedTable(4, 2)) == "ps"
    with ks.HybridStrategy(architecture="allreduce").scope():
        assert choice.entered().is_of_strategy
        table = ks.ShardedTable(4, 2)
        assert choice.entered().name_of_table(table) == "allreduce"


@pytest.mark.parametrize("value", [None, "auto", *choice.OF_TABLES])
def test_a_table_may_ask_for(value):
    choice.check_requested(value)


@pytest.mark.parametrize("value", ["hybrid", "Auto", 3, ["auto"]])
def test_a_table_may_not_ask_for(value):
    with pytest.raises(ValueError, match="'auto', or None for the strategy's"):
        choice.check_requested(value)


@pytest.mark.parametrize("architecture", choice.ARCHITECTURES)
def test_one_process_sends_nothing(architecture):
    strategy = ks.HybridStrategy(architecture=architecture)
    variable = keras.Variable(np.zeros((4, 2)))
    placements = strategy.placements
    placement = placements.of(variable)
    gradient = tf.IndexedSlices(tf.ones([3, 2]), tf.constant([1, 1, 3]))
    for value in (tf.ones([4, 2]), gradient):
        is_of_rows = value is gradient
        update = Update(variable, value, variable, is_of_rows)
        reducer = placement.reducers[is_of_rows]
        reducer.reduce([update], placements.communicator, placements.options)
        np.testing.assert_array_equal(
            update.values, tf.ones(update.values.shape)
        )
