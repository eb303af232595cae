"""The sampled softmax against TensorFlow's and against a Dense layer."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.health import journal
from keras_sparsity.layers.candidate_sampler import LogUniformSampler
from keras_sparsity.layers.sampled_softmax_loss import SampledSoftmaxLoss
from keras_sparsity.update import lookups, rules
from tests import oracles
from tests.conftest import covering, engines

NUM_CLASSES, NUM_SAMPLED, DIM = 40, 12, 6
SEED = 11


def built(**options):
    """A layer with a bias that is not zero."""
    layer = ks.layers.SampledSoftmax(
        NUM_CLASSES, NUM_SAMPLED, **{"seed": SEED, **options}
    )
    layer.build((None, DIM))
    if layer.use_bias:
        layer.bias.assign(np.linspace(-1, 1, NUM_CLASSES)[:, None])
    return layer


def inputs(shape=(9,), seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(*shape, DIM)).astype("float32")
    return hidden, oracles.zipf_ids(rng, NUM_CLASSES, shape)


def next_sample(sampler):
    """What a layer with this sampler's seed draws next, and TensorFlow's form.

    The expected counts are computed here, from the definition.
    """
    ids, num_tries = (x.numpy() for x in sampler.sample())

    def expected_count(classes):
        p = np.log((classes + 2) / (classes + 1)) / np.log(
            sampler.num_classes + 1
        )
        return (1 - (1 - p) ** num_tries).astype("float32")

    return ids, expected_count


def reference_losses(kernel, bias, hidden, labels, sampler):
    """TensorFlow's sampled softmax of the same sample."""
    ids, expected_count = next_sample(sampler)
    flat = np.reshape(labels, (-1, 1))
    losses = tf.nn.sampled_softmax_loss(
        kernel,
        bias,
        flat,
        tf.reshape(hidden, (-1, kernel.shape[1])),
        sampler.num_sampled,
        sampler.num_classes,
        sampled_values=(ids, expected_count(flat), expected_count(ids)),
    )
    return tf.reshape(losses, np.shape(labels))


# The sampler.


def test_samples_are_distinct_and_inside():
    for num_sampled in (1, 12, 39, 40):
        sampler = LogUniformSampler(40, num_sampled, seed=1)
        for _ in range(3):
            ids, num_tries = (x.numpy() for x in sampler.sample())
            assert len(set(ids)) == num_sampled
            assert 0 <= ids.min() <= ids.max() < 40
            assert num_tries >= num_sampled


def test_samples_are_as_frequent_as_tensorflows():
    sampler = LogUniformSampler(30, 8, seed=1)
    num_samples = 3000

    @tf.function
    def frequencies(draw):
        counts = tf.zeros([30])
        for _ in tf.range(num_samples):
            ids = tf.ensure_shape(draw(), [8])
            counts += tf.reduce_sum(tf.one_hot(ids, 30), 0)
        return counts / num_samples

    def tensorflows():
        return tf.random.log_uniform_candidate_sampler(
            tf.constant([[0]], tf.int64), 1, 8, True, 30, seed=5
        ).sampled_candidates

    ours = frequencies(lambda: sampler.sample()[0]).numpy()
    theirs = frequencies(tensorflows).numpy()
    # Five standard deviations of the difference of two frequencies.
    np.testing.assert_allclose(
        ours, theirs, atol=5 * (0.5 / num_samples) ** 0.5
    )


def test_samples_follow_the_seed():
    first = LogUniformSampler(1000, 20, seed=1)
    again = LogUniformSampler(1000, 20, seed=1)
    other = LogUniformSampler(1000, 20, seed=2)
    draw = tf.function(lambda: again.sample()[0])
    steps = [first.sample()[0].numpy() for _ in range(3)]
    for ids in steps:
        np.testing.assert_array_equal(ids, draw())
    assert not np.array_equal(steps[0], steps[1])
    assert not np.array_equal(steps[0], other.sample()[0])


# The loss.


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("shape", [(9,), (4, 5)])
def test_loss_and_gradients_are_tensorflows(use_bias, shape):
    layer = built(use_bias=use_bias)
    hidden, labels = inputs(shape)
    sampler = LogUniformSampler(NUM_CLASSES, NUM_SAMPLED, seed=SEED)
    sampled = next_sample(LogUniformSampler(NUM_CLASSES, NUM_SAMPLED, SEED))[0]
    assert np.intersect1d(sampled, labels).size  # there are accidental hits

    kernel = tf.Variable(layer.kernel.numpy())
    bias = tf.Variable(tf.zeros(NUM_CLASSES))
    variables = [v.value for v in layer.weights]
    if use_bias:
        bias.assign(layer.bias.numpy()[:, 0])
    loss = layer.loss(reduction="none")
    for _ in range(3):
        x = tf.constant(hidden)
        with tf.GradientTape() as tape:
            tape.watch(x)
            expected = reference_losses(kernel, bias, x, labels, sampler)
        wanted = tape.gradient(expected, [x, kernel, bias][: 2 + use_bias])
        with tf.GradientTape() as tape:
            tape.watch(x)
            losses = loss(labels, layer(x, training=True))
        found = tape.gradient(losses, [x, *variables])
        np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-6)
        for theirs, ours in zip(wanted, found, strict=True):
            theirs = tf.convert_to_tensor(theirs)
            ours = tf.reshape(tf.convert_to_tensor(ours), theirs.shape)
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_only_rows_of_labels_and_sample_have_a_gradient():
    layer = built()
    hidden, labels = inputs()
    with tf.GradientTape() as tape:
        loss = layer.loss()(labels, layer(hidden, training=True))
    gradient = tape.gradient(loss, layer.kernel.value)
    assert isinstance(gradient, tf.IndexedSlices)
    assert gradient.indices.shape == [len(labels) + NUM_SAMPLED]


@pytest.mark.parametrize("use_bias", [True, False])
def test_logits_and_their_loss_are_a_dense_layers(use_bias):
    layer = built(use_bias=use_bias)
    hidden, labels = inputs((4, 5))
    dense = keras.layers.Dense(NUM_CLASSES, use_bias=use_bias)
    dense.build((None, DIM))
    dense.kernel.assign(layer.kernel.numpy().T)
    if use_bias:
        dense.bias.assign(layer.bias.numpy()[:, 0])
    logits = layer(hidden)
    np.testing.assert_allclose(logits, dense(hidden), rtol=1e-5, atol=1e-6)
    stock = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for y_true in (labels, labels[..., None]):
        np.testing.assert_allclose(
            layer.loss()(y_true, logits), stock(labels, logits), rtol=1e-5
        )


def test_training_is_told_from_evaluation_where_shapes_are_equal():
    layer = ks.layers.SampledSoftmax(DIM, 3)
    hidden, _ = inputs()
    labels = np.arange(9) % DIM
    logits = layer(hidden)
    stock = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss = layer.loss()
    passed_on = layer(hidden, training=True)
    np.testing.assert_array_equal(passed_on, hidden)
    # Although the layer was last called in training.
    np.testing.assert_allclose(
        loss(labels, logits), stock(labels, logits), rtol=1e-5
    )
    assert not np.isclose(loss(labels, passed_on), stock(labels, hidden))


def test_masks_and_weights_count_as_in_other_losses():
    layer = built()
    hidden, labels = inputs((4, 5))
    sampler = LogUniformSampler(NUM_CLASSES, NUM_SAMPLED, seed=SEED)
    mask = np.arange(20).reshape(4, 5) % 3 > 0
    weights = np.linspace(0, 1, 20).reshape(4, 5).astype("float32")
    each = reference_losses(
        layer.kernel.numpy(), layer.bias.numpy()[:, 0], hidden, labels, sampler
    ).numpy()
    x = tf.constant(hidden)
    x._keras_mask = tf.constant(mask)
    loss = layer.loss()(labels, layer(x, training=True), weights)
    expected = np.sum(each * mask * weights) / np.sum(mask)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_mixed_precision_leaves_logits_and_losses_in_float32():
    layer = built(dtype="mixed_float16")
    hidden, labels = inputs()
    for training in (True, False):
        outputs = layer(hidden.astype("float16"), training=training)
        assert outputs.dtype == tf.float32
        assert layer.loss()(labels, outputs).dtype == tf.float32
    symbolic = layer(keras.Input((DIM,)))
    assert symbolic.dtype == "float32"
    assert symbolic.shape == (None, NUM_CLASSES)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("label", [-1, NUM_CLASSES])
def test_label_outside_is_an_error_that_names_the_layer(training, label):
    layer = built(name="words")
    hidden, labels = inputs()
    labels[3] = label
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"(?s)words.*{label}"
    ):
        layer.loss()(labels, layer(hidden, training=training))


def test_loss_of_other_tensors_is_explained():
    layer = built()
    hidden, labels = inputs()
    for outputs in (layer(hidden) * 1.0, layer(hidden).numpy()):
        with pytest.raises(ValueError, match="from_logits=True"):
            layer.loss()(labels, outputs)
    with pytest.raises(ValueError, match="Expected: \\(9,\\)"):
        layer.loss()(labels[:4], layer(hidden))
    with pytest.raises(ValueError, match="known last dimension"):
        ks.layers.SampledSoftmax(10, 4).build((None, None))


def model(
    dim=DIM,
    use_bias=True,
    num_partitions=None,
    dtype=None,
    embedding=keras.layers.Embedding,
):
    keras.utils.set_random_seed(4)
    softmax = ks.layers.SampledSoftmax(
        NUM_CLASSES,
        NUM_SAMPLED,
        use_bias=use_bias,
        seed=SEED,
        num_partitions=num_partitions,
        name="softmax",
        dtype=dtype,
    )
    words = keras.Input((None,), dtype="int32")
    x = embedding(NUM_CLASSES, dim, name="words")(words)
    return keras.Model(words, softmax(x)), softmax


def data(num_examples=21, time=3):
    rng = np.random.default_rng(8)
    words = oracles.zipf_ids(rng, NUM_CLASSES, (num_examples, time))
    return words, (words + 1) % NUM_CLASSES


def compiled(strategy=None, optimizer="adagrad", **options):
    made, softmax = model(**options)
    strategy = strategy or ks.HybridStrategy()
    with strategy.scope():
        made.compile(optimizer, loss=softmax.loss())
    return made


def test_fit_twice_gives_the_same_bits():
    weights = []
    for _ in range(2):
        made = compiled()
        made.fit(*data(), batch_size=5, epochs=2, verbose=0)
        weights.append(made.get_weights())
    for first, second in zip(*weights, strict=True):
        np.testing.assert_array_equal(first, second)


def test_it_learns():
    made = compiled(optimizer=keras.optimizers.Adagrad(0.5))
    before = made.evaluate(*data(), verbose=0)
    made.fit(*data(), batch_size=7, epochs=30, verbose=0)
    assert made.evaluate(*data(), verbose=0) < 0.5 * before


def test_configurations_round_trip():
    layer = built(use_bias=False, num_partitions=3, name="words")
    again = keras.layers.deserialize(keras.layers.serialize(layer))
    assert again.get_config() == layer.get_config()
    loss = layer.loss(reduction="sum")
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert type(again) is SampledSoftmaxLoss
    assert again.get_config() == loss.get_config()


@pytest.mark.parametrize("use_bias", [True, False])
def test_saved_model_goes_on_where_it_stopped(tmp_path, use_bias):
    made = compiled(use_bias=use_bias, optimizer="adam")
    made.fit(*data(), batch_size=5, verbose=0)
    made.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (made, loaded):
        each.fit(*data(), batch_size=5, shuffle=False, verbose=0)
    for ours, theirs in zip(
        made.get_weights(), loaded.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("dim", [DIM, NUM_CLASSES])
def test_exported_model_is_a_dense_one(use_bias, dim):
    made = compiled(use_bias=use_bias, dim=dim, optimizer="adam")
    made.fit(*data(), batch_size=5, verbose=0)
    plain = ks.export(made)
    check_export(plain, made.get_weights(), made.predict(data()[0], verbose=0))
    assert plain.evaluate(*data(), verbose=0) == pytest.approx(
        made.evaluate(*data(), verbose=0), rel=1e-5
    )
    for ours, theirs in zip(
        made.optimizer.variables, plain.optimizer.variables, strict=True
    ):
        slot = ours.numpy()
        if "softmax" in ours.path:
            slot = slot.T.reshape(theirs.shape)
        np.testing.assert_array_equal(slot, theirs.numpy())


def check_export(plain, weights, logits):
    layer = plain.layers[-1]
    assert type(layer) is keras.layers.Dense
    assert type(plain.loss) is keras.losses.SparseCategoricalCrossentropy
    np.testing.assert_array_equal(layer.kernel.numpy(), weights[1].T)
    np.testing.assert_allclose(
        plain.predict(data()[0], verbose=0), logits, rtol=1e-5, atol=1e-6
    )


def test_exported_mixed_precision_model_has_the_same_logits():
    made, _ = model(dtype="mixed_float16")
    plain = ks.export(made)
    words = data()[0]
    assert plain(words).dtype == tf.float32
    np.testing.assert_allclose(plain(words), made(words), rtol=1e-5)


# Over several processes.

# Uneven parts, one without examples; a rank has more hidden states than `dim`,
# or fewer, or none.
BATCH_SIZES = (7, 8, 1, 2)
# With 1 a rank owns no row; with 3, the inputs' rows are pulled, too.
TRAINED_BY = {
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    # It moves untouched rows, which are brought up to date when read.
    "adam": lambda: keras.optimizers.Adam(0.05, epsilon=1e-4),
}


def global_batches():
    words, labels = data(sum(BATCH_SIZES) * 3)
    ends = np.cumsum(BATCH_SIZES * 3)[:-1]
    return list(zip(np.split(words, ends), np.split(labels, ends), strict=True))


def as_dataset(batches):
    words, labels = (tf.ragged.constant(x) for x in zip(*batches, strict=True))
    dataset = tf.data.Dataset.from_tensor_slices((words, labels))
    return dataset.map(lambda x, y: (x.to_tensor(), y.to_tensor()))


def reference_training(rule):
    """Weights before and after, by TensorFlow's loss and a stock optimizer."""
    made, _ = model()
    variables = [tf.Variable(w) for w in made.get_weights()]
    start = [v.numpy() for v in variables]
    sampler = LogUniformSampler(NUM_CLASSES, NUM_SAMPLED, seed=SEED)
    optimizer = TRAINED_BY[rule]()
    trained = [keras.Variable(v.numpy()) for v in variables]
    for words, labels in global_batches():
        for variable, value in zip(variables, trained, strict=True):
            variable.assign(value.numpy())
        embedding, kernel, bias = variables
        with tf.GradientTape() as tape:
            losses = reference_losses(
                kernel,
                tf.reshape(bias, [-1]),
                tf.gather(embedding, words),
                labels,
                sampler,
            )
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, variables)
        optimizer.apply([tf.convert_to_tensor(g) for g in gradients], trained)
    return start, [v.numpy() for v in trained]


def train(num_partitions, rule):
    """On every rank: what training, evaluation and prediction give."""
    smallest = 0 if rule == "adam" else rules._SMALL_ELEMENTS
    with mock.patch.object(rules, "_SMALL_ELEMENTS", smallest):
        return _train(num_partitions, rule)


def _train(num_partitions, rule):
    embedding = keras.layers.Embedding
    if num_partitions > 1:
        embedding = ks.layers.ShardedEmbedding
    made = compiled(
        optimizer=TRAINED_BY[rule](),
        num_partitions=num_partitions,
        embedding=embedding,
    )
    dataset = as_dataset(global_batches())
    before = set(journal.current().sites())
    history = made.fit(dataset, verbose=0).history
    sites = [s for s in journal.current().sites() if s not in before]
    variables = made.trainable_variables
    return {
        "are_kept": [bool(lookups.keepers_of([v])) for v in variables],
        "roles": [s.call.name for s in sites if s.scope is not None],
        "weights": made.get_weights(),
        "loss": history["loss"],
        "evaluated": made.evaluate(dataset, verbose=0),
        "predicted": made.predict(dataset, verbose=0),
    }


@pytest.mark.parametrize(
    ("engine", "num_partitions", "rule"),
    covering(
        [
            (engine, *case)
            for engine in ("native", "horovod")
            for case in ((1, "adagrad"), (3, "adagrad"), (3, "adam"))
        ],
        # Kept rows: `test_tied.py`.
        [("horovod", 1, "adagrad"), ("native", 3, "adagrad")],
    ),
)
def test_two_processes_give_what_one_gives(
    cluster, engine, num_partitions, rule
):
    start, end = reference_training(rule)
    words, labels = (
        np.concatenate(x) for x in zip(*global_batches(), strict=True)
    )
    logits = end[0][words] @ end[1].T + end[2][:, 0]
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    results = cluster(engine, 2).run(train, num_partitions, rule, timeout=200)
    assert len(results) == 2
    assert results[0]["loss"] == results[1]["loss"]
    for result in results:
        assert result["are_kept"] == 3 * [rule == "adam"]
        difference = oracles.relative_difference(start, end, result["weights"])
        assert max(difference) < 1e-4, difference
        np.testing.assert_allclose(
            result["evaluated"], crossentropy(labels, logits), rtol=1e-4
        )
        np.testing.assert_allclose(result["predicted"], logits, atol=1e-4)
        pulls = [
            f"{table}/{name}"
            for role in result["roles"]
            for table in ("words", "softmax")
            for name in ("pull/ids", "pull/rows")
            if table in role and role.partition("#")[0].endswith(name)
        ]
        # The ids of both before any rows.
        expected = [
            "words/pull/ids",
            "softmax/pull/ids",
            "words/pull/rows",
            "softmax/pull/rows",
        ]
        if num_partitions == 1:  # the words' table is whole everywhere
            expected = [role for role in expected if "softmax" in role]
        assert pulls == expected


def save_and_export(path):
    made = compiled(optimizer="adam", num_partitions=3)
    words, labels = data()
    made.fit(words, labels, batch_size=5, verbose=0)
    plain = ks.export(made)
    slots = [v.numpy() for v in plain.optimizer.variables]
    made.save(path)
    return (
        made.get_weights(),
        plain.get_weights(),
        slots,
        made.predict(words, verbose=0),
    )


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_two_processes_export_and_save_whole_weights(cluster, engine, tmp_path):
    path = str(tmp_path / "model.keras")
    results = cluster(engine, 2).run(save_and_export, path)
    loaded = keras.models.load_model(path)
    predicted = loaded.predict(data()[0], verbose=0)
    plain = ks.export(loaded)
    for weights, exported, slots, logits in results:
        check_export(plain, weights, logits)
        np.testing.assert_allclose(predicted, logits, atol=1e-5)
        for ours, theirs in zip(exported, plain.get_weights(), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        for ours, theirs in zip(slots, plain.optimizer.variables, strict=True):
            np.testing.assert_array_equal(ours, theirs.numpy())


def give_wrong_label(method):
    """The error on this rank, when only the last rank's label is wrong."""
    made = compiled()
    words, labels = data()
    labels[-1, -1] = NUM_CLASSES
    with pytest.raises(Exception) as raised:  # noqa: PT011, B017
        getattr(made, method)(words, labels, batch_size=21, verbose=0)
    return str(raised.value)


@pytest.mark.parametrize("method", ["fit", "evaluate"])
@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_label_outside_is_an_error_on_every_rank(cluster, engine, method):
    for message in cluster(engine, 2).run(give_wrong_label, method):
        assert "softmax" in message
        assert f"[0, {NUM_CLASSES})" in message


def draw_with_other_seeds():
    """Samples of a layer whose seed each rank draws by itself."""
    ks.HybridStrategy()
    keras.utils.set_random_seed(ks.collectives.current().rank)
    layer = ks.layers.SampledSoftmax(1000, 20)
    layer.build((None, DIM))
    return layer.sampler.sample()[0].numpy()


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_ranks_agree_on_samples_whatever_their_seeds(cluster, engine):
    first, second = cluster(engine, 2).run(draw_with_other_seeds)
    np.testing.assert_array_equal(first, second)
