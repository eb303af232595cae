"""Rows that come ahead of their step: the same to the bit, and really early."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.collectives import journal
from keras_sparsity.data import following
from tests import oracles
from tests.conftest import engines

NUM_ROWS, DIM, BATCH = 80, 4, 8


class Elsewhere(keras.layers.Layer):
    """Trains rows of a table that another layer is asked for."""

    def __init__(self, layer):
        super().__init__()
        object.__setattr__(self, "other", layer)  # not a part of this one

    def call(self, inputs):
        return inputs + tf.reduce_sum(self.other.table.gather(tf.range(30)))


class BetweenSteps(keras.callbacks.Callback):
    """Calls a function of the model after some steps."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_train_batch_end(self, batch, logs=None):
        if batch in (1, 3):
            self.function(self.model)


def assign_rows(model):
    table = model.get_layer("words_table").table
    table.assign(table.read() + 1)


def repartition(model):
    table = model.get_layer("words_table").table
    ks.moves.move(model, {table: ("ps", 5)})


def several(elsewhere=False):
    """Several tables, of which one's rows never change."""
    words = keras.Input((3,), dtype="int32")
    users = keras.Input((1,), dtype="int32")
    make = ks.layers.ShardedEmbedding
    table = make(NUM_ROWS, DIM, name="words_table")
    frozen = make(NUM_ROWS, DIM, trainable=False, name="frozen")
    of_users = make(40, DIM, num_partitions=3, name="of_users")
    rows = [table(words), of_users(users), frozen(users)]
    hidden = keras.layers.Flatten()(keras.layers.Concatenate(axis=1)(rows))
    hidden = keras.layers.Dense(3)(hidden)
    if elsewhere:
        hidden = Elsewhere(table)(hidden)
    model = keras.Model([words, users], keras.layers.Dense(1)(hidden))
    return model, lambda words, users: (words, users)


def one():
    """One table of a sequential model that knows its input late."""
    layer = ks.layers.ShardedEmbedding(NUM_ROWS, DIM, name="words_table")
    layers = [layer, keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential(layers), lambda words, users: words


def classes():
    """One table, and rows of the loss that come behind its own."""
    words = keras.Input((3,), dtype="int32")
    layer = ks.layers.ShardedEmbedding(NUM_ROWS, DIM, name="words_table")
    hidden = keras.layers.Flatten()(layer(words))
    softmax = ks.layers.SampledSoftmax(NUM_ROWS, num_sampled=9, seed=1)
    model = keras.Model(words, softmax(keras.layers.Dense(DIM)(hidden)))
    return model, lambda words, users: words


SGD, ADAGRAD, ADAM = (
    ("SGD", {"learning_rate": 0.1}),
    ("Adagrad", {"learning_rate": 0.1}),
    ("Adam", {"learning_rate": 0.01}),
)
# What is trained, how, and how often all rows are pulled when needed: in an
# epoch's first step; where rows did not stay what they had been, from its third
# step on, as in its second all come late; and where a rank's part of a last
# batch is empty, which looks like what comes behind a last one.
CASES = {
    "adagrad": dict(epochs=3, shuffle=True, validates=True, pulls=3 + 3 * 6),
    "exact": dict(rule=ADAM, pulls=6),
    "one": dict(
        make=one,
        rule=SGD,
        steps_per_execution=4,
        num_examples=5 * BATCH + 1,
        pulls=1 + 1,
    ),
    "narrow": dict(
        wire_dtype="bfloat16", steps_per_execution=2, repeat=2, pulls=1
    ),
    "assigned": dict(callback=assign_rows, pulls=1 + 2),
    "moved": dict(callback=repartition, rule=ADAM, sparse_updates="lazy"),
    "elsewhere": dict(elsewhere=True, pulls=5 + 6),
    "eager": dict(run_eagerly=True),
    "classes": dict(make=classes, validates=True, pulls=1 + 6),
}
ON_HOROVOD = ("exact", "narrow", "moved", "assigned", "classes")
NOT_IN_MAKE_TEST = ("one", "narrow", "eager", "elsewhere")


def train(prefetch, case, together=False):
    """Losses, all state and the calls of each role, of one case."""
    case = CASES[case]
    strategy = ks.HybridStrategy(
        architecture="hybrid",
        prefetch=prefetch,
        local_aggregation=together,
        wire_dtype=case.get("wire_dtype"),
        sparse_updates=case.get("sparse_updates", "exact"),
    )
    keras.utils.set_random_seed(3)
    make = case.get("make", several)
    model, inputs = make(elsewhere=True) if "elsewhere" in case else make()
    rule, options = case.get("rule", ADAGRAD)
    with strategy.scope():
        model.compile(
            keras.optimizers.get({"class_name": rule, "config": options}),
            model.layers[-1].loss() if make is classes else "mse",
            steps_per_execution=case.get("steps_per_execution", 1),
            run_eagerly=case.get("run_eagerly", False),
        )
    random = np.random.default_rng(0)
    count = case.get("num_examples", 6 * BATCH)
    words = random.integers(NUM_ROWS, size=(count, 3))
    users = random.integers(40, size=(count, 1))
    y = words.mean(axis=1, keepdims=True) / NUM_ROWS
    if make is classes:
        y = words[:, 0]
    data = tf.data.Dataset.from_tensor_slices((inputs(words, users), y))
    data = data.batch(BATCH).repeat(case.get("repeat", 1))
    if case.get("shuffle"):
        data = data.shuffle(4, seed=1)
    callbacks = [BetweenSteps(case["callback"])] if "callback" in case else []
    before = set(journal.current().totals())
    journal.current().measures = True
    history = model.fit(
        data,
        epochs=case.get("epochs", 1),
        validation_data=data if "validates" in case else None,
        callbacks=callbacks,
        verbose=0,
    ).history
    calls = collections.Counter()
    for key, totals in journal.current().totals().items():
        if key not in before and "words_table" in key[0]:
            calls[key[0].partition("/pull/")[2]] += totals.calls
    journal.current().measures = False
    state = [np.array(w) for w in model.get_weights()]
    return history, state + model.optimizer.state(), calls


def train_all(pulls, together=False):
    """Each case without and with rows that come ahead."""
    for name, num_pulls in pulls.items():
        losses, state, calls = train(False, name, together)
        found = train(True, name, together)
        assert found[0] == losses, name
        for mine, expected in zip(found[1], state, strict=True):
            np.testing.assert_array_equal(mine, expected, name)
        assert not calls["next/ids"], name
        # Not of what was traced anew.
        assert num_pulls in (None, found[2]["ids"]), (name, found[2])


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
def test_the_same_to_the_bit(engine, name, cluster):
    cluster(engine, 2).run(train_all, {name: CASES[name].get("pulls")})


def fit_outside(make, prefetch):
    """Errors of ids outside in the third batch, and the steps before.

    Then a model is trained in the same processes: its weights.
    """
    words = np.zeros((4 * BATCH, 3), "int32")
    words[3 * BATCH - 1] = NUM_ROWS + 7  # in the last rank's part
    users = np.arange(4 * BATCH)[:, np.newaxis] % 40
    random = np.random.default_rng(0)
    inside = random.integers(NUM_ROWS, size=words.shape)

    def fit(words):
        keras.utils.set_random_seed(3)
        strategy = ks.HybridStrategy(architecture="hybrid", prefetch=prefetch)
        model, inputs = make()
        loss = model.layers[-1].loss() if make is classes else "mse"
        with strategy.scope():
            model.compile(keras.optimizers.SGD(0.1), loss)
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
    ("make", "prefetch"),
    [
        (one, False),
        (classes, True),
        pytest.param(one, True, marks=pytest.mark.all_cells),
        pytest.param(several, True, marks=pytest.mark.all_cells),
        pytest.param(several, False, marks=pytest.mark.all_cells),
    ],
)
@pytest.mark.parametrize("engine", engines())
def test_an_id_outside_is_told_in_its_own_step(engine, make, prefetch, cluster):
    for errors in cluster(engine, 2).run(fit_outside, make, prefetch):
        assert len(errors) == 2
        for message, steps in errors:
            assert steps == [0, 1]
            assert "words_table" in message and "received the id" in message
            assert f"[{NUM_ROWS + 7}]" in message


def under_way_where_ids_are_checked(make, prefetch):
    """What may be, in the graphs of a training step."""
    strategy = ks.HybridStrategy(architecture="hybrid", prefetch=prefetch)
    model, inputs = make()
    graphs = []

    def traced(tensor):
        graphs.append(tf.compat.v1.get_default_graph())
        return tensor

    model.layers[-1].call = _before(model.layers[-1].call, traced)
    loss = model.layers[-1].loss() if make is classes else "mse"
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), loss)
    words = np.zeros((2 * BATCH, 3), "int32")
    users = np.zeros((2 * BATCH, 1), "int32")
    model.fit(inputs(words, users), users, BATCH, verbose=0)
    found = [oracles.under_way(graph, "ids_are_inside") for graph in graphs]
    return found[-1]


def _before(call, function):
    def wrapped(inputs, *args, **kwargs):
        return call(function(inputs), *args, **kwargs)

    return wrapped


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("make", [one, several, classes])
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_nothing_is_under_way_where_a_step_may_end(
    engine, make, prefetch, cluster
):
    """Whatever is, ranks that give it up before it begins leave to others."""
    for found, number in cluster(engine, 2).run(
        under_way_where_ids_are_checked, make, prefetch
    ):
        assert number > 0
        assert not found


@pytest.mark.parametrize(
    ("together", "num_pulls"),
    [(True, 6), pytest.param(False, 2, marks=pytest.mark.all_cells)],
)
def test_machines_pull_together_or_ahead(cluster, together, num_pulls):
    cluster("native", 4, 2).run(train_all, {"one": num_pulls}, together)


def test_the_pipeline_runs_once_one_batch_ahead():
    """Also of tensors that are ragged, sparse, and of unknown width."""
    num_read = tf.Variable(0)
    ids = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7]])
    sparse = tf.sparse.from_dense(np.eye(5))
    x = {"ids": ids, "sparse": sparse, "row": tf.range(5)}
    data = tf.data.Dataset.from_tensor_slices((x, tf.range(5))).batch(2)
    data = data.map(lambda x, y: (num_read.assign_add(1), (x, y))[1])
    followed = following.with_following(data)
    assert followed.cardinality() == data.cardinality() == 3
    for epoch in range(2):
        found = [tf.nest.map_structure(_values, each) for each in followed]
        assert num_read == 3 * (epoch + 1)
        batches = [each.batch for each in found]
        inputs = [each.following for each in found]
        assert [x for x, _ in batches[1:]] == inputs[:-1]
        assert [y for _, y in batches] == [[0, 1], [2, 3], [4]]
        assert inputs[-1] == {"ids": [], "sparse": [], "row": []}
    missing = tf.data.Dataset.from_tensors((0, None))
    assert following.with_following(missing) is None


def _values(tensor):
    if isinstance(tensor, tf.SparseTensor):
        tensor = tf.sparse.to_dense(tensor)
    return (
        tensor.to_list()
        if hasattr(tensor, "to_list")
        else tensor.numpy().tolist()
    )


# What comes early.


def bytes_sent(prefetch):
    """By role, and what this rank asks for in each step."""
    strategy = ks.HybridStrategy(architecture="hybrid", prefetch=prefetch)
    words = np.random.default_rng(0).integers(NUM_ROWS, size=(5 * BATCH, 3))
    model, _ = one()
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
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


@pytest.mark.parametrize("engine", engines("horovod"))
def test_each_row_travels_once_early_if_it_can(engine, cluster):
    """Counted on Horovod, whose messages are not padded."""
    processes = cluster(engine, 2)
    plain = processes.run(bytes_sent, False)
    found = processes.run(bytes_sent, True)
    asked = [of_rank for _, of_rank in found]
    early = late = first = 0
    touched = []
    for step in range(5):
        of_step = [asked[r][step] for r in range(2)]
        for rank in range(2):
            # Of the rows of the other rank, which has every second one.
            others = np.asarray(of_step[rank])
            others = others[others % 2 != rank]
            num_touched = np.isin(others, touched).sum()
            if step == 0:
                first += len(others)
            elif step == 1:  # nothing was announced for the one before
                late += len(others)
            else:
                early += len(others) - num_touched
                late += num_touched
        touched = np.concatenate(of_step)

    def total(results, role):
        return sum(sent.get(role, 0) for sent, _ in results)

    of_row = DIM * 4
    assert early > late > 0
    assert total(found, "pull/rows") == first * of_row
    assert total(found, "pull/next/rows") == early * of_row
    # With a verdict for the other rank in each step.
    assert total(found, "pull/late/rows") == (late + 2 * 5) * of_row
    each = total(plain, "pull/rows") // of_row
    assert first + early + late == each
    assert total(plain, "push/rows") == total(found, "push/rows")


def roles_in_order():
    """Of a step's messages, as they were traced."""
    strategy = ks.HybridStrategy(architecture="hybrid", prefetch=True)
    words = np.arange(3 * BATCH).reshape(-1, 3) % NUM_ROWS
    model, _ = one()
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
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
