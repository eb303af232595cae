"""Tables that find their architecture while they are trained."""

import contextlib
import dataclasses
import functools
import io
import time
import types
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.callbacks import auto_architecture, move_times, rank_zero
from keras_sparsity.collectives import speeds
from keras_sparsity.placement.gathered import AllGather
from keras_sparsity.placement.mirrored import AllReduce
from keras_sparsity.sparsity import touches
from tests.conftest import engines

LARGE, SMALL, DIM, BATCH, STEPS = 4_000, 8, 2, 32, 40
# Seconds for each byte: those of AllReduce are least. So many that they pay for
# another trace.
COSTS = {"allreduce": 1.0, "ps": 2.0, "allgather": 3.0, "update": 0}


def data():
    random = np.random.default_rng(3)
    rare = random.zipf(1.5, size=(STEPS * BATCH, 3)) % LARGE
    usual = random.integers(SMALL, size=(STEPS * BATCH, 3))
    labels = (usual.sum(axis=1, keepdims=True) > 10).astype("float32")
    return (rare, usual), labels


def new_model(architecture):
    rare = keras.Input((3,), dtype="int64")
    usual = keras.Input((3,), dtype="int64")
    options = {"architecture": architecture}
    start = keras.initializers.RandomUniform(seed=1)
    large = ks.layers.ShardedEmbedding(
        LARGE, DIM, start, name="large", **options
    )
    small = ks.layers.ShardedEmbedding(
        SMALL, DIM, start, name="small", **options
    )
    hidden = keras.layers.Concatenate()([large(rare), small(usual)])
    out = keras.layers.Dense(
        1,
        "sigmoid",
        kernel_initializer=keras.initializers.GlorotUniform(seed=2),
    )(keras.layers.Flatten()(hidden))
    return keras.Model([rare, usual], out)


def known_speeds(costs=COSTS):
    """While entered, a message takes so many seconds for each byte."""
    found = {path: speeds.Speed(0.0, cost) for path, cost in costs.items()}
    patches = contextlib.ExitStack()
    for owner, name, speed in (
        (speeds, "measure", lambda *_: found),
        (move_times, "REFERENCE", found),
    ):
        patches.enter_context(mock.patch.object(owner, name, speed))
    return patches


def judged(is_slower):
    """While entered, the steps after a move are too slow, or never are."""
    patches = contextlib.ExitStack()
    loss = -1.0 if is_slower else 1e9
    patches.enter_context(mock.patch.object(auto_architecture, "_LOSS", loss))
    if is_slower:  # and there is time to go back
        patches.enter_context(
            mock.patch.object(
                auto_architecture.AutoArchitecture, "_pays", lambda *_: True
            )
        )
    return patches


def noting(*tables):
    """A list of the tables' architectures after each step, and its callback."""
    told = []
    return told, keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: told.append(
            tuple(table.architecture for table in tables)
        )
    )


def train(architecture, is_slower=False, steps_per_execution=1):
    """Architectures after each step, losses, and how far tables have moved."""
    model = new_model(architecture)
    with ks.HybridStrategy(architecture="measured").scope():
        model.compile(
            keras.optimizers.Adam(0.01),
            "binary_crossentropy",
            steps_per_execution=steps_per_execution,
        )
    tables = [model.get_layer(n).table for n in ("large", "small")]
    told, note = noting(*tables)
    x, y = data()
    before = [t.read() for t in tables]
    with known_speeds(), judged(is_slower):
        history = model.fit(
            x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[note]
        )
    whole = [t.read() - start for t, start in zip(tables, before, strict=True)]
    return told, history.history["loss"], whole


@pytest.fixture(scope="module")
def trained(cluster):
    """`trained(engine, *args)` gives each rank's results of `train`."""
    return functools.cache(
        lambda engine, *args: cluster(engine, 2).run(train, *args)
    )


# Whether a step seems slower after the move, and the steps of a call.
CASES = pytest.mark.parametrize(
    ("is_slower", "steps"), [(False, 1), (False, 5), (True, 1)]
)


@CASES
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_table_moves_and_goes_back_if_steps_are_slower(
    engine, is_slower, steps, trained
):
    for told, _, _ in trained(engine, "auto", is_slower, steps):
        first = (auto_architecture._FIRST_STEPS + steps - 1) // steps
        assert told[: first - 1] == [("ps", "ps")] * (first - 1)
        assert told[first] == ("ps", "allreduce")
        assert told[-1] == ("ps", "ps" if is_slower else "allreduce")


@CASES
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_moves_leave_training_as_it_is(engine, is_slower, steps, trained):
    _, expected_loss, expected = trained(engine, "ps")[0]
    for _, loss, found in trained(engine, "auto", is_slower, steps):
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-4)
        for one, other in zip(found, expected, strict=True):
            moved = np.linalg.norm(other)
            assert np.linalg.norm(one - other) < 1e-3 * moved


def over_fits(architecture, kinds):
    """Architectures of both tables after each of some short `fit`s.

    Args:
        kinds: of each `fit`, the number of its steps and whether the model is
            compiled anew before.
    """
    model, told = new_model(None), []
    strategy = ks.HybridStrategy(architecture=architecture)
    tables = [model.get_layer(n).table for n in ("large", "small")]
    x, y = data()
    with known_speeds(), judged(is_slower=True):
        for num_steps, is_compiled in kinds:
            if is_compiled:
                with strategy.scope():
                    model.compile("sgd", "mse", run_eagerly=True)
            model.fit(
                x,
                y,
                batch_size=BATCH,
                steps_per_epoch=num_steps,
                shuffle=False,
                verbose=0,
            )
            told.append(tuple(table.architecture for table in tables))
    return told


# Fits of as many steps, of others, and after another `compile`.
@pytest.mark.parametrize(
    ("second", "is_undone"),
    [((20, False), True), ((18, False), False), ((20, True), False)],
)
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_steps_of_another_kind_take_no_move_back(
    engine, cluster, second, is_undone
):
    found = cluster(engine, 2).run(over_fits, "measured", [(20, True), second])
    moved, start = ("ps", "allreduce"), ("ps", "ps")
    assert found == [[moved, start if is_undone else moved]] * 2


# Of 16 steps before a first look; some `fit`s take 6.
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_steps_of_short_fits_count_together(engine, cluster):
    kinds = [(6, True), *[(6, False)] * 3]
    found = cluster(engine, 2).run(over_fits, "auto", kinds)
    start, moved = ("ps", "ps"), ("ps", "allreduce")
    assert found == [[start, start, moved, moved]] * 2


class Unbuilt(keras.Model):
    """Of a small table alone, which `fit` builds."""

    def __init__(self):
        super().__init__()
        self.small = ks.layers.ShardedEmbedding(SMALL, DIM, architecture="auto")
        self.out = keras.layers.Dense(1, "sigmoid")

    def call(self, ids):
        return self.out(keras.ops.mean(self.small(ids), 1))


def of_layers_to_be_built():
    """The architecture after a first `fit` of a table that asks for "auto"."""
    model, ((_, usual), y) = Unbuilt(), data()
    with ks.HybridStrategy(architecture="hybrid").scope():
        model.compile("sgd", "mse")
    with known_speeds(), judged(is_slower=True):
        model.fit(usual, y, batch_size=BATCH, verbose=0)
    return model.small.table.architecture


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_layers_to_be_built_are_asked(engine, cluster):
    assert cluster(engine, 2).run(of_layers_to_be_built) == ["allreduce"] * 2


def saving_little(epochs):
    """What tables are under, and what is said, where AllReduce saves 10 us.

    In each step of as many epochs, of which two are trained.
    """
    costs = {"ps": 2e-5, "allreduce": 1e-5}
    lines = []
    model = new_model(None)
    with ks.HybridStrategy(architecture="measured").scope():
        model.compile("sgd", "mse")

    def end(epoch, logs):
        model.stop_training = epoch == 1

    x, y = data()
    with (
        mock.patch.object(
            auto_architecture.AutoArchitecture, "_costs", lambda *_: costs
        ),
        mock.patch.object(auto_architecture, "_LOSS", 1e9),
        mock.patch.object(rank_zero, "say", lines.append),
    ):
        model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=epochs,
            verbose=2,
            callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=end)],
        )
    tables = [model.get_layer(n).table for n in ("large", "small")]
    return [t.architecture for t in tables], lines


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_move_pays_for_its_trace(engine, cluster):
    processes = cluster(engine, 2)
    short, long = (processes.run(saving_little, n) for n in (2, 10**9))
    assert [kept for kept, _ in short] == [["ps", "ps"]] * 2
    assert [kept for kept, _ in long] == [["allreduce", "allreduce"]] * 2
    lines, nothing = short[0][1], short[1][1]
    assert len(lines) == 2 and not nothing  # once, on rank 0
    assert "allreduce would not save" in lines[0]


def towers_of_the_same_names():
    """Architectures of a large and a small table of two towers."""

    def tower(num_rows, name):
        ids = keras.Input((3,), dtype="int64")
        rows = ks.layers.ShardedEmbedding(num_rows, DIM, name="rows")
        return keras.Model(ids, rows(ids), name=name)

    inputs = [keras.Input((3,), dtype="int64") for _ in range(2)]
    towers = tower(LARGE, "rare"), tower(SMALL, "usual")
    rows = [one(ids) for one, ids in zip(towers, inputs, strict=True)]
    model = keras.Model(inputs, keras.layers.Dot(2)(rows))
    with ks.HybridStrategy(architecture="measured").scope():
        model.compile("sgd", "mse")
    first, second = model.trainable_variables
    assert first.path == second.path
    x, _ = data()
    with known_speeds(), judged(is_slower=False):
        model.fit(x, np.zeros((len(x[0]), 3, 3)), batch_size=BATCH, verbose=0)
    return [one.layers[-1].table.architecture for one in towers]


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_tables_of_one_path_are_told_apart(engine, cluster):
    found = cluster(engine, 2).run(towers_of_the_same_names)
    assert found == [["ps", "allreduce"]] * 2


class WithItsOwnOptimizer(keras.Model):
    """As adversarial models: none is given to `compile`."""

    def compile(self, rule, loss):
        super().compile(optimizer=None, loss=loss)
        self.rule = ks.HybridOptimizer(rule)

    def train_step(self, data):
        (x, y), variables = data, self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.rule.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def without_an_optimizer_of_keras():
    """Architectures, and the numbers of partitions that were tried."""
    model = new_model(None)
    model = WithItsOwnOptimizer(model.inputs, model.output)
    with ks.HybridStrategy(architecture="measured").scope():
        model.compile(keras.optimizers.Adam(), "mse")
    search = ks.callbacks.PartitionSearch(2, 0, max_seconds=100, verbose=0)
    x, y = data()
    # Many partitions, as a noisy search may choose them, add bytes to "ps".
    costs = {**COSTS, "allgather": 100.0}
    with known_speeds(costs), judged(is_slower=False):
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[search])
    tables = [model.get_layer(n).table for n in ("large", "small")]
    (choice,) = search.result.values()
    return [t.architecture for t in tables], len(choice.samples)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_model_with_optimizers_of_its_own(engine, cluster):
    results = cluster(engine, 2).run(without_an_optimizer_of_keras)
    for found, num_samples in results:
        assert found == ["ps", "allreduce"] and num_samples > 1


def shown(is_listed):
    """What `fit` prints with a progress bar, by default's choice."""
    keras.utils.set_random_seed(0)
    model = new_model(None)
    with ks.HybridStrategy().scope():
        model.compile("sgd", "mse")
    callbacks = None
    if is_listed:
        callbacks = keras.callbacks.CallbackList(
            add_history=True,
            add_progbar=True,
            model=model,
            verbose=1,
            epochs=2,
            steps=STEPS,
        )
    x, y = data()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model.fit(
            x, y, batch_size=BATCH, epochs=2, verbose=1, callbacks=callbacks
        )
    return printed.getvalue()


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_decisions_are_shown_between_bars(engine, cluster):
    processes = cluster(engine, 2)
    # A bar of the user's own is drawn once, too.
    printed = [processes.run(shown, False)[0], *processes.run(shown, True)]
    for text in printed[:2]:
        lines = text.splitlines()
        said = [i for i, line in enumerate(lines) if "Architecture:" in line]
        assert said and "Epoch 2/2" in lines
        for i in said:
            assert lines[i].startswith("Architecture:")
        assert f"{STEPS}/{STEPS}" in lines[said[0] - 1]
        assert lines[said[-1] + 1] == "Epoch 2/2"
    assert not printed[2]


def drift():
    """What a table is under after each step, where its alpha jumps."""
    rows, constant = 64, auto_architecture._FIRST_STEPS + 4
    layer = ks.layers.ShardedEmbedding(rows, DIM)
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer])
    with ks.HybridStrategy(architecture="measured").scope():
        model.compile("sgd", "mse", run_eagerly=True)
    x = np.random.default_rng(4).integers(rows, size=(STEPS * BATCH, 3))
    x[: constant * BATCH] = 0
    y = np.zeros((len(x), 3, DIM), "float32")
    told, note = noting(layer.table)
    with (
        known_speeds(COSTS | {"allreduce": 0.3}),
        mock.patch.object(touches, "_EVERY", 1),
    ):
        model.fit(
            x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[note]
        )
    return told


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_decided_anew_when_alpha_drifts(engine, cluster):
    told = cluster(engine, 2).run(drift)[0]
    # Decided after some steps, and looked at after twice as many.
    change = 2 * auto_architecture._FIRST_STEPS
    assert set(told[: change - 1]) == {("ps",)}
    assert set(told[change:]) == {("allreduce",)}


def by_the_real_speeds():
    """What each path takes on these processes, and a run that uses it."""
    ranks = ks.collectives.current()
    found = speeds.measure(ranks, lambda path, rows: 64 * rows)
    strategy = ks.HybridStrategy(architecture="measured")
    model = new_model(None)
    with strategy.scope():
        model.compile("adam", "binary_crossentropy")
    x, y = data()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    architectures = [
        model.get_layer(n).table.architecture for n in ("large", "small")
    ]
    lines = {name: dataclasses.astuple(line) for name, line in found.items()}
    return lines, architectures


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_by_the_speeds_of_this_cluster(engine, cluster):
    one, other = cluster(engine, 2).run(by_the_real_speeds)
    assert one == other  # the speeds, and what was made of them
    lines, _ = one
    assert lines.keys() == {"allreduce", "ps", "allgather", "update"}
    for latency, per_byte in lines.values():
        assert 0 < latency < 1
        assert 0 <= per_byte < 1e-6


class TwoTables(keras.Model):
    """Pulls each table's rows by themselves: the second ids wait for rows."""

    def __init__(self):
        super().__init__()
        # AllReduce of its 1.6 MB takes longer than gathering touched rows.
        self.large = ks.layers.ShardedEmbedding(50 * LARGE, DIM)
        self.small = ks.layers.ShardedEmbedding(SMALL, DIM)
        self.last = keras.layers.Dense(1, "sigmoid")

    def call(self, inputs):
        rare, usual = inputs
        large = self.large(rare)
        usual += keras.ops.cast(0 * keras.ops.sum(large), usual.dtype)
        rows = keras.ops.concatenate([large, self.small(usual)], 1)
        return self.last(keras.ops.reshape(rows, [-1, 6 * DIM]))


def by_counts(slow_rank):
    """Weights after a run of the default strategy, and its tables' moves.

    Args:
        slow_rank: rank that waits in some of its steps.
    """
    keras.utils.set_random_seed(5)
    model = TwoTables()
    with ks.HybridStrategy().scope():
        model.compile(keras.optimizers.Adagrad(0.1), "binary_crossentropy")
    model.large.build()
    model.small.build()
    told, note = noting(model.large.table, model.small.table)
    is_slow = slow_rank == ks.collectives.current().rank

    def end_of_step(batch, logs):
        time.sleep(0.05 * (is_slow and batch % 3 == 0))

    def end(epoch, logs):
        model.stop_training = epoch == 1

    x, y = data()
    with mock.patch.object(speeds, "measure", side_effect=AssertionError):
        model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=10**6,  # another trace pays
            verbose=0,
            callbacks=[
                note,
                keras.callbacks.LambdaCallback(
                    on_train_batch_end=end_of_step, on_epoch_end=end
                ),
            ],
        )
    return model.get_weights(), told


# Those of `tests/test_repeatable.py` move, too.
@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
def test_two_runs_are_equal_to_the_bit(engine, cluster):
    processes = cluster(engine, 2)
    one = processes.run(by_counts, 0)
    processes.stop()  # the other run has processes of its own
    other = processes.run(by_counts, 1)
    first = auto_architecture._FIRST_STEPS
    for weights, told in one + other:
        assert told[: first - 1] == [("ps", "ps")] * (first - 1)
        assert set(told[first:]) == {("allgather", "allreduce")}
        assert [w.tobytes() for w in weights] == [
            w.tobytes() for w in one[0][0]
        ]


class OfOrdinary(keras.Model):
    """Ordinary `Embedding`s, none of which pays for messages of its own."""

    def __init__(self, rows):
        super().__init__()
        self.tables = [keras.layers.Embedding(rows, DIM) for _ in range(6)]
        self.last = keras.layers.Dense(1, "sigmoid")

    def call(self, ids):
        rows = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.last(keras.ops.concatenate(rows, axis=1))


def move_together(rows, is_distributed=True):
    """Placements, messages and losses after the first decision."""
    keras.utils.set_random_seed(5)
    model = OfOrdinary(rows)
    strategy = ks.HybridStrategy()
    with strategy.scope() if is_distributed else contextlib.nullcontext():
        model.compile(keras.optimizers.Adagrad(0.1), "binary_crossentropy")
    ids = np.random.default_rng(0).integers(rows, size=(20 * BATCH, 6))
    losses = model.fit(
        ids,
        (ids.sum(axis=1) % 2).astype("float32"),
        batch_size=BATCH,
        epochs=10**6,  # another trace pays
        shuffle=False,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: setattr(
                    model, "stop_training", epoch == 1
                )
            )
        ],
    ).history["loss"]
    variables = [layer.embeddings for layer in model.tables]
    found = {
        (
            strategy.placements.of(variable).name,
            variable.table.messages if hasattr(variable, "table") else None,
        )
        for variable in variables
    }
    return found, losses


# A network on which a gather takes longer than a pull and a push.
SLOW_GATHERS = move_times.REFERENCE | {"allgather": speeds.Speed(0.01, 4e-9)}
# AllReduce of 1.6 MB takes longer than messages of rows.
LONG = 50 * LARGE


def move_on_slow_gathers():
    with mock.patch.object(move_times, "REFERENCE", SLOW_GATHERS):
        return move_together(LONG)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_ordinary_embeddings_share_the_messages_of_a_move(engine, cluster):
    _, expected = move_together(LONG, is_distributed=False)
    for found, losses in cluster(engine, 2).run(move_on_slow_gathers):
        ((architecture, messages),) = found
        assert architecture == "ps" and messages.startswith("tables/6 ")
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_gathered_embeddings_share_their_messages(engine, cluster):
    """AllReduce of 80 kB takes less than a gather, and more than a sixth."""
    for found, _ in cluster(engine, 2).run(move_together, 10_000):
        assert found == {("allgather", None)}


@pytest.mark.parametrize("architecture", ["auto", "measured"])
def test_one_process_has_nothing_to_find(architecture):
    strategy = ks.HybridStrategy(architecture=architecture)
    model = new_model("auto")
    with strategy.scope():
        model.compile("sgd", "mse")
    x, y = data()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    assert model.get_layer("large").table.architecture is None


@pytest.mark.parametrize(
    ("architecture", "steps_of_update", "expected"),
    [
        ("measured", None, auto_architecture._FIRST_STEPS),
        # Their times are compared, of whole cycles.
        ("measured", 10, 40),
        ("auto", 10, auto_architecture._FIRST_STEPS),
    ],
)
def test_steps_before_a_decision(architecture, steps_of_update, expected):
    strategy = ks.HybridStrategy(architecture=architecture)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    with strategy.scope():
        model.compile(
            keras.optimizers.SGD(gradient_accumulation_steps=steps_of_update)
        )
    callback = auto_architecture.AutoArchitecture(strategy)
    callback.set_model(model)
    callback.set_params({"steps": 3})
    callback.on_train_begin()
    assert callback._next == expected


def test_auto_is_asked_for_and_not_moved_to():
    config = ks.layers.ShardedEmbedding(9, 2, architecture="auto").get_config()
    assert config["architecture"] == "auto"
    model = new_model("auto")
    table = model.get_layer("large").table
    with pytest.raises(ValueError, match="one of 'ps', 'allgather'"):
        ks.moves.move(model, {table: "auto"})


@pytest.mark.parametrize(
    ("name", "reducer", "expected"),
    [
        # In the message of dense gradients, which is there anyway.
        ("allreduce", AllReduce, 1.0),
        # In that of all variables whose rows are gathered, here of four.
        ("allgather", AllGather, 0.75),
    ],
)
def test_share_of_a_messages_latency(name, reducer, expected):
    placement = types.SimpleNamespace(
        name=name, reducers=(AllReduce, reducer), layout=None
    )
    auto = types.SimpleNamespace(_num_of={"allgather": 4})
    share = auto_architecture.AutoArchitecture._share
    assert share(auto, keras.Variable([1.0]), placement) == expected
