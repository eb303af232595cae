"""A softmax whose kernel is an embedding, against TensorFlow's loss."""

import functools
import pickle
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.exchange.pull import Request
from keras_sparsity.health import journal
from keras_sparsity.layers.candidate_sampler import LogUniformSampler
from keras_sparsity.update import rules
from tests import oracles
from tests.conftest import covering
from tests.layers.test_sampled_softmax import (
    DIM,
    NUM_CLASSES,
    NUM_SAMPLED,
    SEED,
    as_dataset,
    data,
    global_batches,
    next_sample,
    reference_losses,
)
from tests.logged import with_messages_of

RULES = {
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    # It moves untouched rows, which are brought up to date when read.
    "adam": lambda: keras.optimizers.Adam(0.05, epsilon=1e-3),
    "momentum": lambda: keras.optimizers.SGD(0.2, momentum=0.9),
    "clipped": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
    "accumulated": lambda: keras.optimizers.SGD(
        0.5, gradient_accumulation_steps=2
    ),
}

# Each of another kind of model.
EVALUATED = ("adam", "accumulated")


def layers(dtype=None, **options):
    """An embedding, the layers behind it, and a softmax that is tied to it."""
    keras.utils.set_random_seed(4)
    start = keras.initializers.RandomUniform(-0.5, 0.5, seed=1)
    words = ks.layers.ShardedEmbedding(
        NUM_CLASSES, DIM, start, name="words", dtype=dtype, **options
    )
    hidden = keras.layers.Dense(
        DIM, "tanh", kernel_initializer=keras.initializers.RandomNormal(seed=2)
    )
    softmax = ks.layers.SampledSoftmax(
        NUM_CLASSES, NUM_SAMPLED, seed=SEED, table=words, name="softmax"
    )
    return words, hidden, softmax


def functional(**options):
    words, hidden, softmax = layers(**options)
    ids = keras.Input((None,), dtype="int32")
    return keras.Model(ids, softmax(hidden(words(ids)))), softmax


@keras.saving.register_keras_serializable(package="tests")
class Subclassed(keras.Model):
    def __init__(self, **options):
        super().__init__()
        self.words, self.hidden, self.softmax = layers(**options)

    def call(self, inputs, training=None):
        hidden = self.hidden(self.words(inputs))
        return self.softmax(hidden, training=training)


def subclassed(**options):
    model = Subclassed(**options)
    model(np.zeros((1, 2), "int32"))
    return model, model.softmax


class Collected(Subclassed):
    """Looks its rows up in a collection."""

    def __init__(self, **options):
        super().__init__(**options)
        self.look_up = ks.layers.ShardedEmbeddingCollection([self.words])

    def call(self, inputs, training=None):
        (rows,) = self.look_up([inputs])
        return self.softmax(self.hidden(rows), training=training)


def collected(**options):
    model = Collected(**options)
    model(np.zeros((1, 2), "int32"))
    return model, model.softmax


KINDS = {"functional": functional, "subclassed": subclassed}
KINDS["collected"] = collected


@functools.cache
def reference(rule):
    """Weights before and after, by dense gradients of TensorFlow's loss."""
    model, _ = functional()
    trained = [keras.Variable(w) for w in model.get_weights()]
    start = [v.numpy() for v in trained]
    sampler = LogUniformSampler(NUM_CLASSES, NUM_SAMPLED, seed=SEED)
    optimizer = RULES[rule]()
    for words, labels in global_batches():
        with tf.GradientTape() as tape:
            table, kernel, bias, of_classes = (v.value for v in trained)
            hidden = tf.tanh(tf.gather(table, words) @ kernel + bias)
            loss = tf.reduce_mean(
                reference_losses(
                    tf.convert_to_tensor(table),
                    tf.reshape(of_classes, [-1]),
                    hidden,
                    labels,
                    sampler,
                )
            )
        gradients = tape.gradient(loss, [v.value for v in trained])
        optimizer.apply([tf.convert_to_tensor(g) for g in gradients], trained)
    return start, [v.numpy() for v in trained]


def logits_of(weights, words):
    table, kernel, bias, of_classes = weights
    hidden = np.tanh(table[words] @ kernel + bias)
    return hidden @ table.T + of_classes[:, 0]


def compiled(kind, rule, strategy_options, **options):
    model, softmax = KINDS[kind](**options)
    with ks.HybridStrategy(**strategy_options).scope():
        model.compile(RULES[rule](), loss=softmax.loss())
    return model


def train(kind, rule, strategy_options, options):
    """On every rank: what training, evaluation and prediction give."""
    model = compiled(kind, rule, strategy_options, **options)
    dataset = as_dataset(global_batches())
    before = set(journal.current().sites())
    smallest = 0 if rule == "adam" else rules._SMALL_ELEMENTS
    with mock.patch.object(rules, "_SMALL_ELEMENTS", smallest):
        history = model.fit(dataset, shuffle=False, verbose=0).history
        sites = [s for s in journal.current().sites() if s not in before]
        found = {
            "roles": [
                s.call.name.partition("#")[0]
                for s in sites
                if s.scope is not None
            ],
            "weights": model.get_weights(),
            "loss": history["loss"],
        }
        if rule in EVALUATED:
            found["evaluated"] = model.evaluate(dataset, verbose=0)
            found["predicted"] = model.predict(dataset, verbose=0)
        return found


def check(result, rule):
    start, end = reference(rule)
    difference = oracles.relative_difference(start, end, result["weights"])
    assert max(difference) < 1e-5 * 2, difference
    if rule not in EVALUATED:
        return
    words, labels = (
        np.concatenate(x) for x in zip(*global_batches(), strict=True)
    )
    logits = logits_of(end, words)
    stock = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    np.testing.assert_allclose(
        result["evaluated"], stock(labels, logits), rtol=1e-4
    )
    np.testing.assert_allclose(result["predicted"], logits, atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_training_in_one_process_is_that_of_a_dense_matrix(rule):
    check(train("functional", rule, {}, {}), rule)


CASES = [
    ("native", "functional", "adam", {}, {}),
    ("horovod", "functional", "clipped", {}, {"num_partitions": 1}),
    ("horovod", "collected", "accumulated", {}, {}),
]
# Prefetched to the bit in `tests/exchange/test_ahead.py`, too.
_MORE = [
    ("native", "subclassed", "adagrad", {}, {"num_partitions": 3}),
    ("native", "functional", "momentum", {"architecture": "allgather"}, {}),
    ("native", "functional", "adagrad", {"prefetch": True}, {}),
    ("horovod", "subclassed", "adam", {}, {}),
]


def count_rows(kind):
    """Numbers of rows that this rank asks for in the steps of `fit`."""
    found = []

    def merge(request):
        stock(request)
        tf.numpy_function(
            lambda size: found.append(int(size)), [tf.size(request.rows)], []
        )

    stock = Request.merge
    model, softmax = KINDS[kind](num_partitions=3)
    with mock.patch.object(Request, "merge", merge):
        with ks.HybridStrategy().scope():
            model.compile("sgd", softmax.loss())
        model.fit(*data(), batch_size=7, shuffle=False, verbose=0)
    return found


def expected_rows(rank):
    """Rows of the table, each once, and of the bias, in each step."""
    sampler = LogUniformSampler(NUM_CLASSES, NUM_SAMPLED, seed=SEED)
    words, labels = data()
    for start in range(0, len(words), 7):
        middle = start + 3
        part = slice(start, middle) if rank == 0 else slice(middle, start + 7)
        of_loss = set(labels[part].flat) | set(next_sample(sampler)[0])
        yield len(of_loss | set(words[part].flat)) + len(of_loss)


def save(path):
    """Trains, saves and goes on; the epochs of then, and the weights."""
    trained_with_checkpoint(path, 2)
    return trained_with_checkpoint(path, 3)


def trained_with_checkpoint(path, epochs):
    """The epochs that are run from a checkpoint on, and the weights."""
    model, softmax = functional()
    with ks.HybridStrategy().scope():
        model.compile(RULES["momentum"](), softmax.loss())
    checkpoint, run = ks.callbacks.ShardedCheckpoint(path), []
    noting = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: run.append(epoch)
    )
    model.fit(
        *data(),
        batch_size=7,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[checkpoint, noting],
    )
    return run, model.get_weights()


def others(path):
    """All else that two processes do."""
    rows = [count_rows(kind) for kind in ("functional", "subclassed")]
    return rows, look_up_all(), save(path)


def test_rows_travel_once_and_are_saved_once(cluster, tmp_path):
    path = str(tmp_path / "checkpoint")
    ranks = cluster("native", 2).run(others, path, timeout=200)
    for rank, (rows, told, _) in enumerate(ranks):
        for found in rows:
            assert found == list(expected_rows(rank))
        assert len(told) == (rank == 0)
    (told,) = ranks[0][1]
    assert "All 40 rows of 'words'" in told and "table=embedding" in told
    resumed = ranks[1][2], trained_with_checkpoint(path, 4)
    for number, (run, weights) in enumerate(resumed, 3):
        assert run == [number - 1]
        other = str(tmp_path / f"other {number}")
        _, once = trained_with_checkpoint(other, number)
        for first, second in zip(weights, once, strict=True):
            np.testing.assert_allclose(first, second, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("engine", "kind", "rule", "of_strategy", "options"),
    covering(CASES + _MORE, CASES),
)
def test_two_processes_give_what_a_dense_matrix_gives(
    cluster, engine, kind, rule, of_strategy, options
):
    results = cluster(engine, 2).run(train, kind, rule, of_strategy, options)
    assert results[0]["loss"] == results[1]["loss"]
    for result in results:
        check(result, rule)
        if of_strategy:
            continue
        # The rows of both layers, of the table and of the bias.
        for message in ("pull/ids", "pull/rows", "push/rows"):
            of_kind = [
                role for role in result["roles"] if role.endswith(message)
            ]
            assert len(of_kind) == 1, result["roles"]


# Arguments, and copies.


def test_inputs_of_another_length_are_an_error():
    words = ks.layers.ShardedEmbedding(NUM_CLASSES, DIM, name="words")
    softmax = ks.layers.SampledSoftmax(NUM_CLASSES, 3, table=words, name="out")
    with pytest.raises(
        ValueError, match="inputs of 'out'.*, 5.*'words' with output_dim=6"
    ):
        softmax(np.zeros((2, 5)))


def saved(model, path):
    model.save(path / "model.keras")
    return keras.models.load_model(path / "model.keras")


COPIES = {
    "saved": saved,
    "pickled": lambda model, path: pickle.loads(pickle.dumps(model)),
    "cloned": lambda model, path: keras.models.clone_model(model),
    "configured": lambda model, path: type(model).from_config(
        model.get_config()
    ),
    "sharded": lambda model, path: ks.shard_embeddings(model),
}


def sequential():
    words, hidden, softmax = layers()
    made = keras.Sequential([words, hidden, softmax])
    made.build((None, 3))
    return made, softmax


@pytest.mark.parametrize("make", [functional, sequential])
@pytest.mark.parametrize("how", COPIES)
def test_copies_are_tied(how, make, tmp_path):
    model, softmax = make()
    softmax.bias.assign(np.linspace(-1, 1, NUM_CLASSES)[:, None])
    with ks.HybridStrategy().scope():
        model.compile("sgd", softmax.loss())
    model.fit(*data(), batch_size=7, verbose=0)
    for _ in range(2):  # of which each has layers of its own
        copied = COPIES[how](model, tmp_path)
        words, softmax = copied.layers[-3], copied.layers[-1]
        assert softmax.table is words
        assert softmax.kernel is words.embeddings
        assert words not in model.layers
        assert len(copied.weights) == 4
        copied.set_weights(model.get_weights())
        np.testing.assert_allclose(
            copied.predict(data()[0], verbose=0),
            logits_of(model.get_weights(), data()[0]),
            rtol=1e-4,
            atol=1e-5,
        )
        assert copied.layers[-1].get_config() == model.layers[-1].get_config()


def test_copies_of_a_collection_are_tied():
    words, hidden, softmax = layers()
    ids = keras.Input((3,), dtype="int32")
    look_up = ks.layers.ShardedEmbeddingCollection([words, words], name="both")
    first, second = look_up([ids, ids])
    model = keras.Model(ids, softmax(hidden(first + second)))
    copied = keras.models.clone_model(model)
    assert len(copied.weights) == len(model.weights) == 4
    assert copied.get_layer("both").embeddings == [copied.layers[-1].table]
    assert copied.layers[-1].table is not words


@pytest.mark.parametrize("make", [functional, subclassed])
def test_exported_models_are_tied(make, tmp_path):
    model, softmax = make()
    with ks.HybridStrategy().scope():
        model.compile(RULES["adam"](), softmax.loss())
    model.fit(*data(), batch_size=7, shuffle=False, verbose=0)
    plain = ks.export(model)
    assert len(plain.weights) == 4
    for ours, theirs in zip(
        model.optimizer.variables, plain.optimizer.variables, strict=True
    ):
        np.testing.assert_array_equal(
            ours.numpy().reshape(theirs.shape), theirs.numpy()
        )
    words = data()[0]
    logits = model.predict(words, verbose=0)
    np.testing.assert_allclose(
        plain.predict(words, verbose=0), logits, rtol=1e-4, atol=1e-5
    )
    kernels = [w for w in plain.weights if w.shape == (NUM_CLASSES, DIM)]
    assert len(kernels) == 1
    before = kernels[0].numpy()
    plain.fit(*data(), batch_size=7, verbose=0)
    assert abs(kernels[0].numpy() - before).max() > 0.01
    if make is not functional:
        return
    plain.save(tmp_path / "plain.keras")
    loaded = keras.models.load_model(tmp_path / "plain.keras", compile=False)
    assert len(loaded.weights) == 5  # no longer tied
    np.testing.assert_allclose(
        loaded.predict(words, verbose=0),
        plain.predict(words, verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )


# Lookups of every row.


class Whole(keras.Model):
    """Ties its output without a layer for it."""

    def __init__(self):
        super().__init__()
        self.words = ks.layers.ShardedEmbedding(NUM_CLASSES, DIM, name="words")

    def call(self, inputs):
        rows = self.words(keras.ops.arange(NUM_CLASSES))
        return keras.ops.matmul(self.words(inputs), keras.ops.transpose(rows))


@with_messages_of("keras_sparsity.tables.whole")
def look_up_all(told):
    """What is said of it, and the loss."""
    model = Whole()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with ks.HybridStrategy(architecture="ps").scope():
        model.compile("sgd", loss)
    model.fit(*data(), batch_size=7, epochs=2, verbose=0)
    model.evaluate(*data(), batch_size=7, verbose=0)
    return told


# Two layers, and two calls of one, on one table.


def twice(make):
    """Looks users' words up twice, by one layer."""
    start = keras.initializers.RandomUniform(-0.5, 0.5, seed=1)
    words = make(NUM_CLASSES, DIM, start, name="words")
    first = keras.Input((3,), dtype="int32")
    second = keras.Input((2,), dtype="int32")
    rows = [words(first), words(second)]
    hidden = keras.layers.Flatten()(keras.layers.Concatenate(axis=1)(rows))
    last = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.RandomNormal(seed=2)
    )
    return keras.Model([first, second], last(hidden))


def fit_twice(make, strategy=None):
    model = twice(make)
    before = model.get_weights()
    optimizer = keras.optimizers.Adagrad(0.1)
    if strategy is None:
        model.compile(oracles.DenseGradients(optimizer), "mse")
    else:
        with strategy.scope():
            model.compile(optimizer, "mse")
    words, _ = data()
    x = [words, words[:, :2][::-1]]
    model.fit(x, words[:, :1], batch_size=7, shuffle=False, verbose=0)
    return before, model.get_weights()


def fit_twice_together():
    found = []

    def merge(request):
        stock(request)
        found.append(request.counts)

    stock = Request.merge
    with mock.patch.object(Request, "merge", merge):
        _, weights = fit_twice(ks.layers.ShardedEmbedding, ks.HybridStrategy())
    return {len(counts) for counts in found}, weights


def test_a_layer_that_is_called_twice_pulls_once(cluster):
    start, end = fit_twice(keras.layers.Embedding)
    for num_requests, weights in cluster("native", 2).run(fit_twice_together):
        assert num_requests == {2}  # in one pull
        assert max(oracles.relative_difference(start, end, weights)) < 1e-5


# Mixed precision, narrow rows, and strategies of stages.


def train_narrow():
    """Losses in float32, in mixed precision, and of narrow rows."""
    losses = []
    dataset = as_dataset(global_batches())
    for dtype, wire in ((None, None), ("mixed_bfloat16", None), (None, "int8")):
        model = compiled(
            "functional", "adagrad", {"wire_dtype": wire}, dtype=dtype
        )
        history = model.fit(dataset, shuffle=False, verbose=0).history
        losses.append(history["loss"][-1])
    return losses


# Of tables by themselves: `tests/exchange`, `tests/test_equality.py`.
@pytest.mark.all_cells
def test_narrow_numbers_come_near(cluster):
    for exact, mixed, narrow in cluster("native", 2).run(train_narrow):
        assert mixed == pytest.approx(exact, rel=0.02) and mixed != exact
        assert narrow == pytest.approx(exact, rel=0.02) and narrow != exact


@pytest.mark.parametrize(
    "make",
    [
        lambda: ks.PipelineStrategy(),
        lambda: ks.HybridStrategy(synchronous=False, delay="bounded"),
    ],
)
def test_other_strategies_name_the_layer(make):
    model, softmax = functional()
    with make().scope(), pytest.raises(ValueError, match="layer 'words'"):
        model.compile("sgd", softmax.loss())
