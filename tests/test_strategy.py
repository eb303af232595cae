"""`HybridStrategy`: Keras's `fit`, own loops."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity._tf import keras_input
from tests import oracles
from tests.conftest import engines

ROWS = 13


BATCH = 8


SUM, MEAN = tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN


LOSS = "sparse_categorical_crossentropy"


def raised(call, error=ValueError):
    """The message of the error that a call raises."""
    try:
        call()
    except error as e:
        return str(e)
    raise AssertionError("nothing was raised")


def network(embedding=ks.layers.ShardedEmbedding, **options):
    inputs = keras.Input((5,), dtype="int32")
    rows = embedding(ROWS, 4, name="words", **options)(inputs)
    features = keras.layers.GlobalAveragePooling1D()(rows)
    hidden = keras.layers.Dense(6, activation="tanh")(features)
    return keras.Model(
        inputs, keras.layers.Dense(3, activation="softmax")(hidden)
    )


def examples(count):
    rng = np.random.default_rng(5)
    ids = oracles.zipf_ids(rng, ROWS, (count, 5))
    return ids, rng.integers(0, 3, (count,))


def assert_same(got, expected, tolerance=1e-6, what=""):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, err_msg=what)


def own_loop(wrap, embedding=None, seed=None, eager=False):
    """Weights and losses of a custom training loop."""
    strategy = ks.HybridStrategy()
    keras.utils.set_random_seed(7 if seed is None else seed + strategy.rank)
    dataset = tf.data.Dataset.from_tensor_slices(examples(20)).batch(BATCH)
    dataset = strategy.experimental_distribute_dataset(dataset)
    with strategy.scope():
        model = network(embedding or ks.layers.ShardedEmbedding)
        optimizer = wrap(keras.optimizers.Adam(0.01, epsilon=1e-3))
        loss_object = keras.losses.SparseCategoricalCrossentropy(
            reduction="none"
        )

    def train_step(inputs):
        ids, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(ids, training=True)
            loss = tf.nn.compute_average_loss(
                loss_object(labels, predictions), global_batch_size=BATCH
            )
        gradients = tape.gradient(loss, model.trainable_variables)
        pairs = zip(gradients, model.trainable_variables, strict=True)
        optimizer.apply_gradients(pairs)
        return loss

    def distributed_train_step(inputs):
        losses = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(SUM, losses, axis=None)

    if eager:
        optimizer.build(model.trainable_variables)
    else:
        distributed_train_step = tf.function(distributed_train_step)
    losses = [float(distributed_train_step(batch)) for batch in dataset]
    return losses, model.get_weights()


def own_loops():
    return {
        "graph": own_loop(ks.HybridOptimizer),
        "eager": own_loop(ks.HybridOptimizer, eager=True),
        "other seeds": own_loop(ks.HybridOptimizer, seed=7),
        # Without tables the stock optimizer reduces through the strategy.
        "dense": own_loop(ks.HybridOptimizer, keras.layers.Embedding),
    }


# Own loops: `training/test_step_losses.py`, cells of `test_equality.py`.
@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
def test_own_loop_is_that_of_one_process(cluster, engine):
    losses, weights = own_loop(oracles.DenseGradients, keras.layers.Embedding)
    assert_same(own_loop(ks.HybridOptimizer)[1], weights)
    for results in cluster(engine, 2).run(own_loops):
        for name, result in results.items():
            np.testing.assert_allclose(result[0], losses, rtol=1e-5)
            assert_same(result[1], weights, what=name)


def compiled(optimizer="adagrad", model=None, **options):
    strategy = ks.HybridStrategy()
    model = model or network()
    with strategy.scope():
        model.compile(optimizer, loss=LOSS, metrics=["accuracy"], **options)
    return model


def by_method(method, model):
    """Trains for one epoch of three batches, the last one short."""
    x, y = examples(20)
    if method == "train_on_batch":
        for start in range(0, 20, BATCH):
            batch = slice(start, start + BATCH)
            logs = model.train_on_batch(x[batch], y[batch], return_dict=True)
        return {key: [float(value)] for key, value in logs.items()}
    return model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0).history


METHODS = {
    "fit": {},
    "run_eagerly": {"run_eagerly": True},
    "steps_per_execution": {
        "steps_per_execution": 2 if keras_input.ENDS_EXECUTIONS else 3
    },
    "train_on_batch": {"run_eagerly": True},
}


def train_by(methods):
    results = {}
    rank = ks.collectives.current().rank
    x, y = examples(20)
    for method in methods:
        options = METHODS[method]
        # Another seed on each rank: rank 0's values count.
        keras.utils.set_random_seed(11 + 100 * rank)
        model = compiled(**options)
        if method == "run_eagerly":  # built in the scope
            with ks.HybridStrategy().scope():
                model = network()
            keras.utils.set_random_seed(11 + 100 * rank)
            model = compiled(model=keras.models.clone_model(model), **options)
        history = by_method(method, model)
        outputs = model.predict(x, batch_size=BATCH, verbose=0)
        evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
        if method == "train_on_batch":
            np.testing.assert_allclose(
                model.predict_on_batch(x[:3]), outputs[:3], rtol=1e-5
            )
            on_batch = model.test_on_batch(x, y)
            np.testing.assert_allclose(on_batch, evaluated, rtol=1e-5)
        results[method] = history, model.get_weights(), outputs, evaluated
    return results


@pytest.mark.parametrize(
    "methods",
    [
        # In the scope; by batches.
        ("run_eagerly", "train_on_batch"),
        # In cells of `test_equality.py`, too.
        pytest.param(
            ("fit", "steps_per_execution"), marks=pytest.mark.all_cells
        ),
    ],
    ids=lambda methods: methods[0],
)
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_every_method_of_keras_is_that_of_one_process(cluster, engine, methods):
    def stock():
        keras.utils.set_random_seed(11)
        model = network(keras.layers.Embedding)
        oracles.dense_reference(
            model,
            keras.optimizers.Adagrad(),
            loss=LOSS,
            metrics=["accuracy"],
            run_eagerly=True,
        )
        return model

    # Of the last batch alone.
    by_batch = by_method("train_on_batch", stock())
    model = stock()
    by_fit = by_method("fit", model)
    x, y = examples(20)
    outputs = model.predict(x, verbose=0)
    evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    for results in cluster(engine, 2).run(train_by, methods, timeout=220):
        for method, result in results.items():
            history = by_batch if method == "train_on_batch" else by_fit
            for key, values in history.items():
                np.testing.assert_allclose(
                    result[0][key], values, rtol=1e-5, err_msg=method
                )
            assert_same(result[1], model.get_weights(), what=method)
            np.testing.assert_allclose(result[2], outputs, atol=1e-6)
            np.testing.assert_allclose(result[3], evaluated, rtol=1e-5)


def train_half_wrapped():
    """The errors of what would train without any aggregation."""
    x, y = examples(BATCH)
    errors = {}
    outside = network()
    outside.compile("adagrad", loss=LOSS)
    errors["compiled outside"] = raised(lambda: outside.fit(x, y, verbose=0))
    model = compiled()
    model.fit(x, y, verbose=0)
    model.optimizer = keras.optimizers.Adam()
    errors["swapped, fit"] = raised(lambda: model.fit(x, y, verbose=0))
    errors["swapped, batch"] = raised(lambda: model.train_on_batch(x, y))
    model.compile("adagrad", loss=LOSS)
    errors["compiled again"] = raised(lambda: model.fit(x, y, verbose=0))
    errors["own loop"] = raised(lambda: own_loop(lambda o: o))
    plain = keras.optimizers.Adam()
    errors["own loop, made outside"] = raised(lambda: own_loop(lambda o: plain))
    dense = keras.Sequential([keras.layers.Dense(1)])
    dense.compile(ks.HybridOptimizer(keras.optimizers.Adam()), loss="mse")
    errors["wrapped, not compiled in the scope"] = raised(
        lambda: dense.fit(x.astype("float32"), y, verbose=0)
    )
    before = model.get_weights()
    assert all(np.isfinite(w).all() for w in before)
    # What the errors say to write.
    model.optimizer = ks.HybridOptimizer(keras.optimizers.Adagrad())
    with ks.HybridStrategy().scope():
        model.compile(model.optimizer, loss=LOSS)
    model.fit(x, y, verbose=0)
    return errors


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_half_wrapped_is_refused(cluster, engine):
    for errors in cluster(engine, 2).run(train_half_wrapped):
        assert len(errors) == 7
        for case, message in errors.items():
            if "own loop" in case:
                assert "ks.HybridOptimizer(optimizer)" in message, message
            else:
                assert "strategy.scope()" in message, (case, message)


def random_and_normalized():
    """Dropout of each rank, and the statistics of batch normalization."""
    keras.utils.set_random_seed(2)
    drop = keras.layers.Dropout(0.5)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.BatchNormalization(),
            drop,
            keras.layers.Dense(1),
        ]
    )
    x, y = np.random.default_rng(0).normal(size=(9, 5)), np.zeros(9)
    # The last batch has one example: one rank has none.
    with ks.HybridStrategy().scope():
        model.compile("sgd", loss="mse")
    history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history
    mask = np.asarray(drop(np.ones((1, 400)), training=True))
    return history["loss"], mask, model.get_weights()


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_ranks_draw_apart_and_stay_together(cluster, engine):
    (loss, mask, weights), (other_loss, other_mask, other_weights) = cluster(
        engine, 2
    ).run(random_and_normalized)
    assert np.isfinite(loss).all()
    assert loss == other_loss
    assert not np.array_equal(mask, other_mask)
    assert 100 < (mask > 0).sum() < 300
    for a, b in zip(weights, other_weights, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.fixture
def mixed_float16():
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


def nesting(optimizer):
    """Names of the optimizers, from the outermost to the innermost."""
    names = []
    while optimizer is not None:
        names.append(type(optimizer).__name__)
        optimizer = vars(optimizer).get(
            "inner_optimizer",
            getattr(type(optimizer), "inner_optimizer", None)
            and optimizer.inner_optimizer,
        )
    return names


NESTED = ["HybridOptimizer", "LossScaleOptimizer", "Adam"]


@pytest.mark.parametrize("given", ["adam", "scaled"])
def test_loss_scaling_is_inside(mixed_float16, given, tmp_path):
    optimizer = "adam"
    if given == "scaled":
        adam = keras.optimizers.Adam()
        optimizer = keras.optimizers.LossScaleOptimizer(adam)
    model = compiled(optimizer, run_eagerly=True)
    assert nesting(model.optimizer) == NESTED
    x, y = examples(BATCH)
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    state = model.optimizer.state()
    with ks.HybridStrategy().scope():
        inside = keras.models.load_model(tmp_path / "model.keras")
    outside = keras.models.load_model(tmp_path / "model.keras")
    with ks.HybridStrategy().scope():
        outside.compile(outside.optimizer, loss=LOSS, run_eagerly=True)
    for loaded in (inside, outside):
        assert nesting(loaded.optimizer) == NESTED
        assert_same(loaded.optimizer.state(), state)
    plain = ks.export(model)
    assert nesting(plain.optimizer) == NESTED[1:]
    assert_same([v.numpy() for v in plain.optimizer.variables], state)


def train_on_few_examples():
    """Batches smaller than the number of ranks, through a convolution."""
    keras.utils.set_random_seed(4)
    inputs = keras.Input((5,), dtype="int32")
    rows = ks.layers.ShardedEmbedding(ROWS, 4)(inputs)
    outputs = keras.layers.Dense(2)(keras.layers.Conv1D(3, 2)(rows))
    model = keras.Model(inputs, outputs)
    with ks.HybridStrategy().scope():
        model.compile("sgd", loss="mse")
    x, _ = examples(5)
    y = np.zeros((5, 4, 2), "float32")
    history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0).history
    return history["loss"], model.get_weights(), model.predict(x, 4, verbose=0)


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_ranks_without_examples(cluster, engine):
    loss, expected, outputs = train_on_few_examples()
    for result in cluster(engine, 2).run(train_on_few_examples):
        np.testing.assert_allclose(result[0], loss, rtol=1e-5)
        assert_same(result[1], expected)
        np.testing.assert_allclose(result[2], outputs, atol=1e-6)
