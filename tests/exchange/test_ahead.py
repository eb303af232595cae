"""Prefetched rows: the same results to the bit, and messages sent early."""

import collections
import dataclasses
import gc
import itertools
import types
import typing

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.collectives.engine import Route
from keras_sparsity.exchange import ahead
from keras_sparsity.health import journal
from keras_sparsity.update import rules
from tests import oracles
from tests.conftest import covering, engines

NUM_ROWS, DIM, BATCH = 80, 4, 8
NUM_USERS = 40


# Models. Each comes with the function that makes its inputs of words and users.


class ReadsRows(keras.layers.Layer):
    """Trains rows of a table that is part of another layer."""

    def __init__(self, layer):
        super().__init__()
        object.__setattr__(self, "other", layer)  # not a part of this one

    def call(self, inputs):
        return inputs + tf.reduce_sum(self.other.table.gather(tf.range(30)))


def several(trained_elsewhere=False):
    """Several tables, one of them frozen."""
    words = keras.Input((3,), dtype="int32")
    users = keras.Input((1,), dtype="int32")
    make = ks.layers.ShardedEmbedding
    table = make(NUM_ROWS, DIM, name="words_table")
    frozen = make(NUM_ROWS, DIM, trainable=False, name="frozen")
    of_users = make(NUM_USERS, DIM, num_partitions=3, name="of_users")
    rows = [table(words), of_users(users), frozen(users)]
    hidden = keras.layers.Flatten()(keras.layers.Concatenate(axis=1)(rows))
    hidden = keras.layers.Dense(3)(hidden)
    if trained_elsewhere:
        hidden = ReadsRows(table)(hidden)
    model = keras.Model([words, users], keras.layers.Dense(1)(hidden))
    return model, lambda words, users: (words, users)


def elsewhere():
    return several(trained_elsewhere=True)


def one():
    """One table of a sequential model that knows its input late."""
    layer = ks.layers.ShardedEmbedding(NUM_ROWS, DIM, name="words_table")
    layers = [layer, keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential(layers), lambda words, users: words


def classes(is_tied=False):
    """One table, and a loss that pulls rows behind the table's."""
    words = keras.Input((3,), dtype="int32")
    layer = ks.layers.ShardedEmbedding(NUM_ROWS, DIM, name="words_table")
    hidden = keras.layers.Flatten()(layer(words))
    softmax = ks.layers.SampledSoftmax(
        NUM_ROWS, num_sampled=9, seed=1, table=layer if is_tied else None
    )
    model = keras.Model(words, softmax(keras.layers.Dense(DIM)(hidden)))
    return model, lambda words, users: words


def tied():
    """One table, of which the loss needs rows, too."""
    return classes(is_tied=True)


def compiled(make, prefetch, optimizer, strategy_options=None, **options):
    """A model in a strategy of its own, its inputs and the strategy."""
    strategy = ks.HybridStrategy(
        architecture="hybrid", prefetch=prefetch, **(strategy_options or {})
    )
    model, inputs = make()
    loss = model.layers[-1].loss() if make in (classes, tied) else "mse"
    with strategy.scope():
        model.compile(optimizer, loss, **options)
    return model, inputs, strategy


# The same to the bit.


class BetweenSteps(keras.callbacks.Callback):
    """Calls a function of the words' table after some steps."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_batch_end(self, batch, logs=None):
        if batch in (1, 3):
            self.function(self.model, self.model.get_layer("words_table").table)


def assign_rows(model, table):
    table.assign(table.read() + 1)


def move_table(model, table):
    ks.moves.move(model, {table: ("ps", 5)})


@dataclasses.dataclass(frozen=True)
class Case:
    """A training, and how often it pulls all rows when they are needed.

    That is in an epoch's first step, and, where rows did not stay as they had
    been, from its third step on; in its second, all of them come late. A last
    batch of which a rank's part is empty adds none.
    """

    pulls: int
    make: typing.Callable = several
    optimizer: str = "Adagrad"
    learning_rate: float | keras.optimizers.schedules.LearningRateSchedule = 0.1
    keeps_rows: bool = False  # of these small tables
    sparse_updates: str = "exact"
    wire_dtype: str | None = None
    steps_per_execution: int = 1
    run_eagerly: bool = False
    num_examples: int = 6 * BATCH
    repeat: int = 1
    epochs: int = 1
    shuffle: bool = False
    validates: bool = False
    between_steps: typing.Callable | None = None

    def data(self, inputs):
        random = np.random.default_rng(0)
        words = random.integers(NUM_ROWS, size=(self.num_examples, 3))
        users = random.integers(NUM_USERS, size=(self.num_examples, 1))
        labels = words.mean(axis=1, keepdims=True) / NUM_ROWS
        if self.make in (classes, tied):
            labels = words[:, 0]
        data = tf.data.Dataset.from_tensor_slices(
            (inputs(words, users), labels)
        )
        data = data.batch(BATCH).repeat(self.repeat)
        return data.shuffle(4, seed=1) if self.shuffle else data


ADAM = {"optimizer": "Adam", "learning_rate": 0.01}
CASES = {
    "adagrad": Case(2, epochs=2, shuffle=True),
    "exact": Case(6, **ADAM),
    "kept": Case(1, **ADAM, keeps_rows=True, steps_per_execution=2, repeat=2),
    "decayed": Case(
        1 + 2,
        optimizer="AdamW",
        learning_rate=keras.optimizers.schedules.CosineDecay(0.1, 9),
        keeps_rows=True,
        between_steps=assign_rows,
    ),
    "one": Case(
        1,
        make=one,
        optimizer="SGD",
        steps_per_execution=4,
        num_examples=5 * BATCH + 1,
    ),
    "narrow": Case(1, wire_dtype="bfloat16", steps_per_execution=2, repeat=2),
    "assigned": Case(1 + 2, between_steps=assign_rows),
    "moved": Case(1, between_steps=move_table, sparse_updates="lazy", **ADAM),
    "elsewhere": Case(5 + 6, make=elsewhere),
    # Calls of eager steps are not measured.
    "eager": Case(0, run_eagerly=True),
    "classes": Case(1 + 6, make=classes, validates=True),
    "tied": Case(1, make=tied, num_examples=5 * BATCH + 1),
}
ON_HOROVOD = ("kept", "exact", "narrow", "moved", "assigned", "classes")
NOT_IN_MAKE_TEST = (
    "one",
    "exact",
    "adagrad",
    "narrow",
    "eager",
    "elsewhere",
    "assigned",
)


def train(prefetch, name, local_aggregation=False):
    """Losses, all state and the calls of each role of the words' pull."""
    case = CASES[name]
    keras.utils.set_random_seed(3)
    model, inputs, _ = compiled(
        case.make,
        prefetch,
        getattr(keras.optimizers, case.optimizer)(case.learning_rate),
        {
            "local_aggregation": local_aggregation,
            "wire_dtype": case.wire_dtype,
            "sparse_updates": case.sparse_updates,
        },
        steps_per_execution=case.steps_per_execution,
        run_eagerly=case.run_eagerly,
    )
    data = case.data(inputs)
    callbacks = [BetweenSteps(case.between_steps)] * bool(case.between_steps)
    before = set(journal.current().totals())
    journal.current().measures = True
    history = model.fit(
        data,
        epochs=case.epochs,
        validation_data=data if case.validates else None,
        callbacks=callbacks,
        verbose=0,
    ).history
    calls = collections.Counter()
    gc.collect()  # The counts of an earlier trace go with its function.
    for key, totals in journal.current().totals().items():
        if key not in before and "words_table" in key[0]:
            calls[key[0].partition("/pull/")[2]] += totals.calls
    journal.current().measures = False
    state = [np.array(w) for w in model.get_weights()]
    return history, state + model.optimizer.state(), calls


def train_both(name, num_pulls, local_aggregation=False):
    """A case without and with prefetch."""
    small = rules._SMALL_ELEMENTS
    if CASES[name].keeps_rows:
        rules._SMALL_ELEMENTS = 0
    losses, state, calls = train(False, name, local_aggregation)
    found = train(True, name, local_aggregation)
    rules._SMALL_ELEMENTS = small
    assert found[0] == losses
    for mine, expected in zip(found[1], state, strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert not calls["next/ids"]
    # Not of what was traced anew.
    assert found[2]["ids"] == num_pulls, found[2]


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        pytest.param(
            *engine.values,
            name,
            marks=[
                *engine.marks,
                *[pytest.mark.all_cells] * (name in NOT_IN_MAKE_TEST),
            ],
        )
        for name in CASES
        for engine in engines(
            usually="horovod" if name in ON_HOROVOD else "native"
        )
    ],
)
def test_same_to_the_bit(engine, name, cluster):
    cluster(engine, 2).run(train_both, name, CASES[name].pulls)


@pytest.mark.parametrize(
    ("local_aggregation", "num_pulls"),
    [(True, 6), pytest.param(False, 1, marks=pytest.mark.all_cells)],
)
def test_machines_pull_together_or_prefetch(
    cluster, local_aggregation, num_pulls
):
    cluster("native", 4, 2).run(train_both, "one", num_pulls, local_aggregation)


# An id outside of the table.


def fit_outside(make, prefetch):
    """Errors of ids outside in the third batch, and the steps before.

    Then a model is trained in the same processes: its weights.
    """
    words = np.zeros((4 * BATCH, 3), "int32")
    words[3 * BATCH - 1] = NUM_ROWS + 7  # in the last rank's part
    users = np.arange(4 * BATCH)[:, np.newaxis] % NUM_USERS
    random = np.random.default_rng(0)
    inside = random.integers(NUM_ROWS, size=words.shape)

    def fit(words):
        keras.utils.set_random_seed(3)
        model, inputs, _ = compiled(make, prefetch, keras.optimizers.SGD(0.1))
        steps = []
        count = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: steps.append(batch)
        )
        x, y = inputs(words, users), users if make is classes else words[:, :1]
        error = None
        try:
            model.fit(x, y, BATCH, callbacks=[count], shuffle=False, verbose=0)
        except tf.errors.InvalidArgumentError as raised:
            error = str(raised)
        return model, error, steps

    before = fit(inside)[0].get_weights()
    errors = [fit(words)[1:] for _ in range(2)]
    after = fit(inside)[0].get_weights()
    for weights, expected in zip(after, before, strict=True):
        np.testing.assert_array_equal(weights, expected)
    return errors


@pytest.mark.parametrize(
    ("engine", "make", "prefetch"),
    covering(
        [
            (engine, *case)
            for engine in ("native", "horovod")
            for case in [
                (one, False),
                (classes, True),
                (one, True),
                (several, True),
                (several, False),
            ]
        ],
        [("native", classes, True)],
    ),
)
def test_an_id_outside_fails_in_its_own_step(engine, make, prefetch, cluster):
    for errors in cluster(engine, 2).run(fit_outside, make, prefetch):
        assert len(errors) == 2
        for message, steps in errors:
            assert steps == [0, 1]
            assert "words_table" in message and "received the id" in message
            assert f"[{NUM_ROWS + 7}]" in message


def under_way_where_ids_are_checked(make, prefetch):
    """Messages that may be, in the graphs of a training step."""
    model, inputs, _ = compiled(make, prefetch, keras.optimizers.SGD(0.1))
    graphs, call = [], model.layers[-1].call

    def call_and_note(*args, **kwargs):
        graphs.append(tf.compat.v1.get_default_graph())
        return call(*args, **kwargs)

    model.layers[-1].call = call_and_note
    words = np.zeros((2 * BATCH, 3), "int32")
    users = np.zeros((2 * BATCH, 1), "int32")
    model.fit(inputs(words, users), users, BATCH, verbose=0)
    return oracles.under_way(graphs[-1], "ids_are_inside")


@pytest.mark.parametrize(
    ("engine", "make", "prefetch"),
    covering(
        itertools.product(
            ("native", "horovod"), (one, several, classes), (True, False)
        ),
        [
            ("native", several, False),
            ("native", classes, True),
        ],
    ),
)
def test_nothing_is_under_way_where_a_step_may_end(
    engine, make, prefetch, cluster
):
    """Ranks that give a message up before it begins leave it to others."""
    for found, number in cluster(engine, 2).run(
        under_way_where_ids_are_checked, make, prefetch
    ):
        assert number > 0
        assert not found


# Messages of a step.


def bytes_sent(prefetch):
    """By role, and the distinct ids of this rank in each step."""
    model, _, strategy = compiled(one, prefetch, keras.optimizers.SGD(0.1))
    words = np.random.default_rng(0).integers(NUM_ROWS, size=(5 * BATCH, 3))
    journal.current().measures = True
    model.fit(words, words[:, :1], BATCH, shuffle=False, verbose=0)
    sent = {
        role.removeprefix("table/words_table/"): totals.sent_bytes
        for (role, _), totals in journal.current().totals().items()
    }
    journal.current().measures = False
    half = BATCH // strategy.size
    parts = words.reshape(5, strategy.size, half * 3)
    return sent, [np.unique(part) for part in parts[:, strategy.rank]]


def expected_rows(ids):
    """Numbers of rows that come when needed, early and late.

    Args:
        ids: by rank, a list of the ids of each step.
    """
    at_first = early = late = 0
    touched = []
    for step, of_ranks in enumerate(zip(*ids, strict=True)):
        for rank, of_rank in enumerate(of_ranks):
            # Of the rows of the other rank, which has every second one.
            others = of_rank[of_rank % 2 != rank]
            num_touched = np.isin(others, touched).sum()
            if step == 0:
                at_first += len(others)
            elif step == 1:  # nothing was announced for the one before
                late += len(others)
            else:
                early += len(others) - num_touched
                late += num_touched
        touched = np.concatenate(of_ranks)
    return at_first, early, late


@pytest.mark.parametrize("engine", engines("horovod"))
def test_each_row_travels_once_and_early_if_it_can(engine, cluster):
    """Counted on Horovod, whose messages are not padded."""
    processes = cluster(engine, 2)
    plain, found = (processes.run(bytes_sent, on) for on in (False, True))
    at_first, early, late = expected_rows([ids for _, ids in found])
    assert early > late > 0

    def rows_of(results, role):
        sent = sum(sent.get(role, 0) for sent, _ in results)
        return sent / (DIM * 4)

    assert rows_of(found, "pull/rows") == at_first
    assert rows_of(found, "pull/next/rows") == early
    # With a verdict for the other rank in each step.
    assert rows_of(found, "pull/late/rows") == late + 2 * 5
    assert rows_of(plain, "pull/rows") == at_first + early + late
    assert rows_of(plain, "push/rows") == rows_of(found, "push/rows")


def test_messages_are_as_long_as_the_most_rows_that_a_rank_sends():
    """Where they are padded: of the early ones, and of the late ones."""
    communicator = types.SimpleNamespace(size=2, pads=False)
    exchange = types.SimpleNamespace(communicator=communicator)
    # From rank 0 come 3 addresses, of which one goes early, and from rank 1
    # 5, of which 3 do. This rank asks them for 2 and 1.
    route = Route(*map(tf.constant, ([2, 1], [3, 5], 5)))
    goes_early = tf.constant([1, 0, 0, 1, 1, 0, 0, 1]) > 0
    comes_early = tf.constant([1, 0, 1]) > 0
    found, most_late = ahead.Ahead._early_route(
        types.SimpleNamespace(exchange=exchange), route, goes_early, comes_early
    )
    assert found.splits.numpy().tolist() == [1, 3]
    assert found.received_splits.numpy().tolist() == [1, 1]
    assert (int(found.largest), int(most_late)) == (3, 1 + 2)


def test_early_and_late_rows_take_their_places():
    """Behind the verdicts of owners 0 and 1, of which each sends late rows."""
    early = tf.constant([[1.0], [4.0]])
    late = tf.constant([[-1.0], [2.0], [3.0], [-1.0], [5.0]])
    comes_late = tf.constant([0, 1, 1, 0, 1]) > 0
    owner = tf.constant([0, 0, 0, 1, 1])
    rows = ahead._in_place(early, late, comes_late, owner)
    assert rows.numpy().ravel().tolist() == [1, 2, 3, 4, 5]


def roles_in_order():
    """Of a step's messages, as they were traced."""
    words = np.arange(3 * BATCH).reshape(-1, 3) % NUM_ROWS
    model, _, _ = compiled(one, True, keras.optimizers.SGD(0.1))
    before = set(journal.current().sites())
    model.fit(words, words[:, :1], BATCH, shuffle=False, verbose=0)
    sites = [s for s in journal.current().sites() if s not in before]
    return [site.call.name for site in sites if site.scope is not None]


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_early_rows_leave_behind_the_steps_own(engine, cluster):
    for roles in cluster(engine, 2).run(roles_in_order):
        places = [
            # Losses are also traced when the model is built.
            max(index for index, role in enumerate(roles) if name in role)
            for name in ("next/ids", "late/rows", "next/rows", "loss", "push")
        ]
        assert places == sorted(places), roles
