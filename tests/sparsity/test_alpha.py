"""alpha, popularity and balance against NumPy's counts of the batches."""

import dataclasses
import math
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.board import model_plan
from keras_sparsity.layers import sampled_softmax
from keras_sparsity.sparsity import touches
from tests.conftest import engines

ROWS, DIM, IDS = 307, 2, 5
BATCH, BATCHES = 11, 34  # the last batch has 3 examples
EXAMPLES = BATCH * (BATCHES - 1) + 3
PARTITIONS = 3
# Of which the first 16 are sampled, then every 16th.
SAMPLED = (*range(16), 31)


# What NumPy counts.


@dataclasses.dataclass
class Counted:
    alpha: float
    alpha_machine: float
    num_steps: int
    busiest_share: float
    owner_shares: tuple


def zipf_ids(seed=0, shape=(EXAMPLES, IDS)):
    """With repeats inside of a rank's part, and across ranks."""
    draws = np.random.default_rng(seed).zipf(1.3, shape)
    return (draws * 7 - 1) % ROWS


def steps_of(ids, size):
    """List over steps of the list over ranks of a global batch's parts."""
    steps = []
    for start in range(0, len(ids), BATCH):
        batch = ids[start : start + BATCH]
        bounds = [rank * len(batch) // size for rank in range(size + 1)]
        parts = [
            batch[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)
        ]
        # One example of zeros stands in where there is none.
        steps.append([p if len(p) else np.zeros_like(ids[:1]) for p in parts])
    return steps


def count(
    steps, machines=None, num_partitions=None, owners=None, num_rows=ROWS
):
    """What the parts of all steps come to, those that are sampled."""
    size = len(steps[0])
    machines = machines or [0] * size
    sampled = [step for i, step in enumerate(steps) if i in SAMPLED]
    touches_of_row = np.zeros(num_rows, int)
    together = 0
    for step in sampled:
        for part in step:
            touches_of_row[np.unique(part)] += 1
        for machine in set(machines):
            on_it = [
                part.reshape(-1)
                for part, place in zip(step, machines, strict=True)
                if place == machine
            ]
            together += len(np.unique(np.concatenate(on_it)))
    total = touches_of_row.sum()
    shares = None
    if num_partitions:
        served = np.zeros(size)
        for row, number in enumerate(touches_of_row):
            served[owners[row % num_partitions % size]] += number
        shares = tuple(served / total)
    busiest = np.sort(touches_of_row)[::-1][: max(1, num_rows // 100)]
    return Counted(
        total / (size * len(sampled) * num_rows),
        together / (len(set(machines)) * len(sampled) * num_rows),
        len(sampled),
        busiest.sum() / total,
        shares,
    )


def check(found, expected):
    for field in dataclasses.fields(Counted):
        value = getattr(found, field.name)
        other = getattr(expected, field.name)
        if other is None:
            assert value is None, (found, expected)
        else:
            np.testing.assert_allclose(
                value, other, rtol=1e-12, err_msg=f"{field.name}: {found}"
            )


# Models of all kinds of variables.


class Twice(keras.layers.Layer):
    """A table of one's own, that is gathered twice in each step."""

    def build(self, input_shape):
        self.table = ks.ShardedTable(ROWS, DIM, owner_name=self.name)
        self.rows = self.table.variable

    def call(self, ids):
        first = self.table.gather(ids)
        return first + self.table.gather((ids * 2) % ROWS)


NAMES = ["sharded", "twice", "ordinary", "dense"]


def make_model(regularizer=None):
    inputs = keras.Input((IDS,), dtype="int32")
    layers = [
        ks.layers.ShardedEmbedding(
            ROWS,
            DIM,
            num_partitions=PARTITIONS,
            embeddings_regularizer=regularizer,
        ),
        Twice(),
        keras.layers.Embedding(ROWS, DIM),
    ]
    rows = keras.layers.Add()([layer(inputs) for layer in layers])
    dense = keras.layers.Dense(1, use_bias=False)
    return keras.Model(inputs, dense(keras.layers.Flatten()(rows)))


class Reader(keras.callbacks.Callback):
    """Reads between the first steps."""

    def on_train_begin(self, logs=None):
        self.num_steps = []

    def on_train_batch_end(self, batch, logs=None):
        if len(self.num_steps) < 4:
            first = ks.sparsity.measured(self.model)[0]
            self.num_steps.append(first.num_steps)


def fit_all(steps_per_execution=1, machines=None):
    """What is measured of each variable, by name; the model."""
    strategy = ks.HybridStrategy(architecture="hybrid")
    if machines is not None:
        assert strategy.collectives.machines == tuple(machines)
    # Of a table that is spread, it touches no row of others.
    model = make_model("l2" if strategy.size > 1 else None)
    with strategy.scope():
        model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    targets = np.zeros((EXAMPLES, 1))
    before = ks.sparsity.measured(model)
    reader = Reader()
    model.fit(
        *(zipf_ids(), targets, BATCH),
        shuffle=False,
        verbose=0,
        callbacks=[reader],
    )
    assert reader.num_steps == [
        min(steps_per_execution * calls, 16) for calls in (1, 2, 3, 4)
    ]
    found = ks.sparsity.measured(model)
    for v, nothing, variable in zip(
        found, before, model.trainable_variables, strict=True
    ):
        assert v.name == nothing.name == variable.path
        assert nothing.num_steps == 0
        assert nothing.alpha is nothing.busiest_share is None
    return dict(zip(NAMES, found, strict=True)), model


def sparsity_of_all(*args):
    return fit_all(*args)[0]


def expected_of_all(size, machines=None):
    """dict from each sparse variable's name to what NumPy counts."""
    machines = machines or [0] * size
    # First local rank 0 of every machine, then local rank 1.
    owners = sorted(
        range(size), key=lambda r: (machines[:r].count(machines[r]), r)
    )
    ids = zipf_ids()
    both = np.concatenate([ids, ids * 2 % ROWS], axis=1)
    of_name = {
        "sharded": (ids, PARTITIONS),
        "twice": (both, size),
        "ordinary": (ids, None),
    }
    found = _expected(of_name, size, machines, owners)
    if 1 < machines.count(0) < size:  # the spread ones' popularity, by machine
        merged = {
            name: (read, num_partitions)
            for name, (read, num_partitions) in of_name.items()
            if num_partitions
        }
        for name, other in _expected(
            merged, size, machines, owners, together=True
        ).items():
            found[name] = dataclasses.replace(
                found[name],
                busiest_share=other.busiest_share,
                owner_shares=other.owner_shares,
            )
    return found


def _expected(of_name, size, machines, owners, together=False):
    def steps(read):
        found = steps_of(read, size)
        if not together:
            return found
        # What the machines touch, as if each were a rank; others none.
        return [
            [
                np.concatenate(
                    [p for p, m in zip(step, machines, strict=True) if m == k]
                )
                if machines.index(k) == rank
                else step[0][:0]
                for rank, k in enumerate(machines)
            ]
            for step in found
        ]

    return {
        name: count(
            steps(read),
            machines,
            num_partitions if size > 1 else None,
            owners,
        )
        for name, (read, num_partitions) in of_name.items()
    }


def check_all(found, expected):
    for name, counted in expected.items():
        check(found[name], counted)
        assert found[name].shape == (ROWS, DIM)
        assert found[name].dtype == "float32"
    dense = found["dense"]
    assert (dense.alpha, dense.alpha_machine, dense.num_steps) == (
        None,
        None,
        0,
    )
    assert dense.busiest_share is dense.owner_shares is None
    # As planning takes it.
    specs = [v.spec() for v in found.values()]
    sizes = [math.prod(v.shape) for v in found.values()]
    alphas = [expected[n].alpha if n in expected else 1.0 for n in found]
    np.testing.assert_allclose(
        ks.planning.alpha_model(specs), np.average(alphas, weights=sizes)
    )
    assert [s.alpha_machine for s in specs[:3]] == [
        v.alpha_machine for v in list(found.values())[:3]
    ]


def test_one_process(tmp_path):
    found, model = fit_all()
    expected = expected_of_all(1)
    check_all(found, expected)
    # Only training counts.
    model.evaluate(zipf_ids(1), np.zeros((EXAMPLES, 1)), BATCH, verbose=0)
    model.predict(zipf_ids(1), BATCH, verbose=0)
    again = ks.sparsity.measured(model)
    check_all(dict(zip(NAMES, again, strict=True)), expected)
    # Neither weights nor the optimizer's state, which SGD has two of.
    assert (len(model.variables), len(model.optimizer.variables)) == (4, 2)
    model.save_weights(tmp_path / "model.weights.h5")
    model.load_weights(tmp_path / "model.weights.h5")
    again = ks.sparsity.measured(model)
    check_all(dict(zip(NAMES, again, strict=True)), expected)


def test_the_check_can_fail():
    ids = zipf_ids()
    expected = expected_of_all(2)["sharded"]
    steps = steps_of(ids, 2)
    both = np.concatenate([ids, ids * 2 % ROWS], axis=1)
    wrong = {
        "another batch": count([steps[-1], *steps[1:]], None, 3, [0, 1]),
        "another step is sampled": count(steps[:1] + steps, None, 3, [0, 1]),
        "twice": count(steps_of(both, 2), None, 3, [0, 1]),
        "other owners": count(steps, None, 3, [1, 0]),
        "other machines": count(steps, [0, 1], 3, [0, 1]),
    }
    check(count(steps, None, 3, [0, 1]), expected)
    for counted in wrong.values():
        with pytest.raises(AssertionError):
            check(counted, expected)


@pytest.mark.parametrize(
    ("engine", "num_processes", "machines"),
    [
        ("native", 4, [0, 0, 1, 1]),
        *(
            pytest.param(*e.values, 2, [0, 0], marks=e.marks)
            for e in engines("horovod")
        ),
    ],
)
def test_fit_of_several_processes(cluster, engine, num_processes, machines):
    results = cluster(engine, num_processes, max(machines) + 1).run(
        sparsity_of_all, 4, machines
    )
    check_all(results[0], expected_of_all(num_processes, machines))
    assert all(found == results[0] for found in results)


def alpha_beside_a_server():
    """Alpha of each variable of rows, and rows of a process in its costs."""
    found, model = fit_all()
    costs = [v.costs for v in model_plan.of_running(model).variables]
    # In a ring of three on one machine, which count as machines.
    gathered = [each["allgather"].index_bytes[0] for each in costs[:3]]
    # A hop sends, and receives, two bytes for each row.
    rows = [number / (2 * 2 * 2) for number in gathered]
    return [found[name].alpha for name in NAMES[:3]], rows


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_dedicated_servers_are_no_workers(cluster, engine):
    results = cluster(engine, 2, num_servers=1).run(alpha_beside_a_server)
    ids, both = (
        zipf_ids(),
        np.concatenate([zipf_ids(), zipf_ids() * 2 % ROWS], 1),
    )
    of_workers = [count(steps_of(each, 2)).alpha for each in (ids, both, ids)]
    for of_worker, rows_of_process in results:
        np.testing.assert_allclose(of_worker, of_workers, rtol=1e-12)
        # Of all three, one of which touches nothing.
        assert rows_of_process == [
            math.ceil(alpha * ROWS * 2 / 3) for alpha in of_workers
        ]


# Loops of one's own.

LOOP_ROWS = 50


def loop_ids(rank, step):
    """Uneven parts; rank 0 has none in the third step."""
    shape = 0 if (rank, step) == (0, 2) else 3 + 4 * rank
    random = np.random.default_rng(100 * rank + step)
    return random.zipf(1.5, shape) % LOOP_ROWS


def own_loop():
    """Two optimizers, with options of their own, in a function in another."""
    strategy = ks.HybridStrategy(architecture="hybrid")
    table = ks.ShardedTable(LOOP_ROWS, DIM, owner_name="own")
    ordinary = keras.Variable(np.ones((LOOP_ROWS, DIM)), name="ordinary")
    scaled = ks.HybridOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    )
    accumulating = ks.HybridOptimizer(
        keras.optimizers.SGD(gradient_accumulation_steps=2)
    )

    @tf.function
    def replica_step(ids):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(table.gather(ids) ** 2)
            loss_of_other = tf.reduce_sum(
                tf.gather(ordinary.value, (ids + 1) % LOOP_ROWS) ** 2
            )
            scaled_loss = scaled.scale_loss(loss)
        gradients = tape.gradient(scaled_loss, [table.variable])
        scaled.apply(gradients, [table.variable])
        gradients = tape.gradient(loss_of_other, [ordinary])
        accumulating.apply(gradients, [ordinary])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(ids):
        strategy.run(replica_step, args=(ids,))

    variables = [table.variable, ordinary]
    found = []
    for number in range(6):
        if number == 4:  # with a function that is traced already
            found.append(ks.sparsity.measured(variables))
            ks.sparsity.reset(variables)
        step(tf.constant(loop_ids(strategy.rank, number)))
    if strategy.size > 1:
        with pytest.raises(ValueError, match="(?s)must be the same.*rank 1"):
            ks.sparsity.measured(variables[strategy.rank :])
    return [*found, ks.sparsity.measured(variables)]


@pytest.mark.parametrize("engine", [None, *engines(usually="native")])
def test_own_loops(cluster, engine):
    size = 2 if engine else 1
    results = cluster(engine, size).run(own_loop) if engine else [own_loop()]
    for found, numbers in zip(results[0], (range(4), range(4, 6)), strict=True):
        ids = [[loop_ids(r, n) for r in range(size)] for n in numbers]
        others = [[(i + 1) % LOOP_ROWS for i in step] for step in ids]
        ways = (size, range(size)) if size > 1 else ()
        check(found[0], count(ids, None, *ways, num_rows=LOOP_ROWS))
        check(found[1], count(others, num_rows=LOOP_ROWS))
    assert all(found == results[0] for found in results)


def eager_softmax():
    """What is measured of kernel and bias, and the ids of each step."""
    layer = ks.layers.SampledSoftmax(LOOP_ROWS, num_sampled=5, seed=3)
    model = keras.Sequential([keras.Input((DIM,)), layer])
    with ks.HybridStrategy(architecture="hybrid").scope():
        model.compile("sgd", layer.loss(), run_eagerly=True)
    gather, seen = sampled_softmax.gather_side_by_side, []

    def seen_gather(tables, ids, *args):
        seen.append(ids.numpy())
        return gather(tables, ids, *args)

    labels = np.arange(12) ** 2 % LOOP_ROWS
    with mock.patch.object(sampled_softmax, "gather_side_by_side", seen_gather):
        model.fit(np.ones((12, DIM)), labels, batch_size=4, verbose=0)
    return ks.sparsity.measured(model), seen


@pytest.mark.parametrize("engine", [None, *engines("native")])
def test_sampled_softmax(cluster, engine):
    size = 2 if engine else 1
    results = (
        cluster(engine, size).run(eager_softmax)
        if engine
        else [eager_softmax()]
    )
    steps = list(zip(*(seen for _, seen in results), strict=True))
    assert len(steps) == 3
    ways = (size, range(size)) if size > 1 else ()
    for found in results[0][0]:
        check(found, count(steps, None, *ways, num_rows=LOOP_ROWS))


# What it leaves alone.


def weights(steps):
    keras.utils.set_random_seed(5)
    model = make_model()
    with ks.HybridStrategy(architecture="hybrid").scope():
        model.compile("adagrad", "mse", jit_compile=True)
    ids = zipf_ids()[: steps * BATCH]
    model.fit(ids, np.ones((len(ids), 1)), BATCH, shuffle=False, verbose=0)
    return model.get_weights(), ks.sparsity.measured(model)


def test_left_out_and_under_xla():
    """Training comes to the same without it; XLA compiles it."""
    first, found = weights(3)
    with touches.left_out():
        second, without = weights(3)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)
    check(found[0], count(steps_of(zipf_ids()[: 3 * BATCH], 1)))
    assert [v.num_steps for v in without] == [0, 0, 0, 0]


@pytest.mark.parametrize("is_noted", [False, True])
def test_each_variable_has_samples_of_its_own(is_noted):
    """Counted together or each alone, and not sampled in the same steps."""

    def counting(variables):
        @tf.function
        def step(*ids):
            ended = [(v, i, None) for v, i in zip(variables, ids, strict=True)]
            if is_noted:  # as of tables, at their owners
                largest = [2 + tf.size(i, tf.int64) for i in ids]
                touches.note(
                    variables,
                    lambda: [
                        (i, tf.zeros_like(i), bound, None)
                        for i, bound in zip(ids, largest, strict=True)
                    ],
                )
                ended = [(v, None, None) for v in variables]
            touches.end_step(ended)

        return step

    alone, together = (
        [keras.Variable(np.zeros((ROWS, DIM))) for _ in range(2)]
        for _ in range(2)
    )
    steps = [counting([variable]) for variable in alone]
    both = counting(together)
    words = tf.constant(zipf_ids(), tf.int64)
    for number in range(40):
        if number == 20:  # of the second ones, the next steps are sampled
            for _, variable in (alone, together):
                touches.of(variable).reset()
        ids = words[number], words[number + 1, :3]
        both(*ids)
        for step, of_variable in zip(steps, ids, strict=True):
            step(of_variable)
    readings = [
        [touches.existing(variable).read(ROWS) for variable in variables]
        for variables in (alone, together)
    ]
    for one, other in zip(*readings, strict=True):
        np.testing.assert_equal(
            dataclasses.asdict(one), dataclasses.asdict(other)
        )
    assert [one.num_steps for one in readings[0]] == [17, 16]
    assert readings[0][0].num_touches != readings[0][1].num_touches


def test_nothing_is_kept_of_a_frozen_variable():
    """Its gradient may come with others', and is never applied."""
    trained, frozen = (
        keras.Variable(np.zeros((ROWS, DIM)), trainable=trainable)
        for trainable in (True, False)
    )

    @tf.function
    def step(ids):
        noted = ids, tf.zeros_like(ids), 1, None
        touches.note([frozen, trained], lambda: [noted, noted])
        touches.end_step([(trained, None, None)])

    words = tf.constant(zipf_ids(), tf.int64)
    for number in range(20):
        step(words[number])
    assert touches.existing(frozen) is None
    reading = touches.existing(trained).read(ROWS)
    distinct = [len(np.unique(words[n])) for n in SAMPLED if n < 20]
    assert (reading.num_steps, reading.num_touches) == (16, sum(distinct))


def test_a_gradient_that_is_dense_is_told_so():
    model = make_model("l2")
    with ks.HybridStrategy(architecture="hybrid").scope():
        model.compile("sgd", "mse", run_eagerly=True)
    model.fit(zipf_ids()[:BATCH], np.zeros((BATCH, 1)), verbose=0)
    found = ks.sparsity.measured(model)
    assert [v.alpha is None for v in found] == [True, False, False, True]


def test_a_scalar_weight_has_no_popular_rows():
    scaled = keras.layers.Attention(use_scale=True)
    scaled.build([(2, 3, 4), (2, 3, 4)])
    assert scaled.weights[0].shape == ()
    assert ks.sparsity.popularity(scaled) == {}


def test_unequal_machines_have_a_spec():
    found = ks.sparsity.VariableSparsity("v", (10, 2), "float32", 0.5, 0.4)
    assert found.spec().alpha_machine == 0.5
    assert found.spec(3).num_partitions == 3
