"""Exported models: stock Keras, with the same weights and state."""

import functools
import os
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity._tf import keras_models
from tests import oracles
from tests.conftest import covering

VOCABULARY, LENGTH, DIM = 30, 6, 4


USERS, ITEMS = 20, 25


class TokenAndPositionEmbedding(keras.layers.Layer):
    def __init__(self, length, vocabulary, dim, **kwargs):
        super().__init__(**kwargs)
        self.token_emb = keras.layers.Embedding(vocabulary, dim, mask_zero=True)
        self.pos_emb = keras.layers.Embedding(length, dim)

    def call(self, x):
        positions = keras.ops.arange(0, keras.ops.shape(x)[-1])
        return self.token_emb(x) + self.pos_emb(positions)


class TransformerBlock(keras.layers.Layer):
    def __init__(self, dim, heads, **kwargs):
        super().__init__(**kwargs)
        self.att = keras.layers.MultiHeadAttention(heads, dim)
        self.ffn = keras.Sequential(
            [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(dim)]
        )
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]

    def call(self, inputs):
        out = self.norms[0](inputs + self.att(inputs, inputs))
        return self.norms[1](out + self.ffn(out))


def text_classification():
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = TokenAndPositionEmbedding(LENGTH, VOCABULARY, DIM)(inputs)
    x = TransformerBlock(DIM, 2)(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x))


class MaskedLanguageModel(keras.Model):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(
            reduction=None
        )

    def compile(self, optimizer, **kwargs):
        super().compile(optimizer, **kwargs)

    def train_step(self, data):
        features, labels, weights = data
        with tf.GradientTape() as tape:
            predictions = self(features, training=True)
            losses = self.loss_fn(labels, predictions)
            rows = tf.cast(tf.shape(features)[0], losses.dtype)
            size = self.distribute_strategy.num_replicas_in_sync
            rows *= size  # as the parts of a batch are of one size
            loss = tf.reduce_sum(losses * weights) / rows
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        self.loss_tracker.update_state(loss * size)
        return {"loss": self.loss_tracker.result()}

    @property
    def metrics(self):
        return [self.loss_tracker]


def masked_language_model():
    inputs = keras.Input((LENGTH,), dtype="int64")
    words = keras.layers.Embedding(VOCABULARY, DIM, name="words")(inputs)
    # Called on a constant: the graph has its rows, and no layer.
    position = keras.layers.Embedding(
        LENGTH, DIM, keras.initializers.RandomUniform(seed=1)
    )(keras.ops.arange(LENGTH))
    x = TransformerBlock(DIM, 1)(words + position)
    outputs = keras.layers.Dense(VOCABULARY, activation="softmax")(x)
    return MaskedLanguageModel(inputs, outputs)


class RecommenderNet(keras.Model):
    def __init__(self, users, items, dim, **kwargs):
        super().__init__(**kwargs)
        self.user_embedding = keras.layers.Embedding(
            users,
            dim,
            embeddings_initializer="he_normal",
            embeddings_regularizer=keras.regularizers.l2(1e-3),
        )
        self.user_bias = keras.layers.Embedding(users, 1)
        self.item_embedding = keras.layers.Embedding(items, dim)
        self.item_bias = keras.layers.Embedding(items, 1)

    def call(self, inputs):
        user, item = inputs[:, 0], inputs[:, 1]
        dot = keras.ops.sum(
            self.user_embedding(user) * self.item_embedding(item), 1, True
        )
        return dot + self.user_bias(user) + self.item_bias(item)


def recommender():
    return RecommenderNet(USERS, ITEMS, DIM)


class Tower(keras.Model):
    def __init__(self, rows):
        super().__init__()
        self.layers_of = {
            "ids": keras.Sequential(
                [keras.layers.Embedding(rows, DIM), keras.layers.Dense(DIM)]
            )
        }

    def call(self, ids):
        return self.layers_of["ids"](ids)


class Towers:
    def __init__(self):
        self.query, self.candidate = Tower(USERS), Tower(ITEMS)


class TwoTowers(keras.Model):
    def __init__(self):
        super().__init__()
        self.towers = Towers()
        self.query = self.towers.query
        self.candidate = self.towers.candidate

    def call(self, inputs):
        query = self.towers.query(inputs[:, 0])
        candidate = self.towers.candidate(inputs[:, 1])
        return keras.ops.sum(query * candidate, 1, True)


def two_towers():
    model = TwoTowers()
    model(np.zeros((1, 2), "int32"))
    return model


class SasRec(keras.Model):
    def __init__(self):
        super().__init__()
        self.item_embedding = keras.layers.Embedding(ITEMS, DIM)
        self.position_embedding = keras.layers.Embedding(LENGTH, DIM)
        self.blocks = [TransformerBlock(DIM, 1) for _ in range(2)]
        self.heads = (keras.layers.Dense(DIM), keras.layers.Dense(1))

    def call(self, ids):
        x = self.item_embedding(ids)
        x = x + self.position_embedding(keras.ops.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        target = self.heads[0](self.item_embedding(ids[:, -1]))
        return self.heads[1](x[:, -1] * target)


def sas_rec():
    return SasRec()


class BuildsItsTable(keras.layers.Layer):
    def build(self, input_shape):
        self.column = keras.layers.Embedding(ITEMS, DIM)
        self.column.build(input_shape)

    def call(self, ids):
        return self.column(ids)


def tab_transformer():
    inputs = keras.Input((2,), dtype="int32")
    shared = keras.layers.Embedding(ITEMS, DIM, name="shared")
    columns = [
        shared(inputs[:, 0]),
        keras.layers.Lambda(lambda ids: shared(ids), (DIM,))(inputs[:, 1]),
        BuildsItsTable()(inputs[:, 1]),
    ]
    x = keras.ops.stack(columns, axis=1)
    x = TransformerBlock(DIM, 1)(x)
    x = keras.layers.Concatenate()(
        [keras.layers.Flatten()(x), keras.ops.cast(inputs, "float32") / 10]
    )
    return keras.Model(inputs, keras.layers.Dense(1)(x))


def sequential():
    return keras.Sequential(
        [
            keras.layers.Embedding(VOCABULARY, DIM),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )


# Each with the number of its tables.
MODELS = {
    text_classification: 2,
    masked_language_model: 1,
    recommender: 4,
    two_towers: 2,
    sas_rec: 2,
    tab_transformer: 2,
    sequential: 1,
}


def inputs_of(make):
    rng = np.random.default_rng(1)
    pairs = (recommender, two_towers, tab_transformer)
    shape = (16, 2) if make in pairs else (16, LENGTH)
    return oracles.zipf_ids(rng, USERS, shape).astype("int32")


def fit(model, make):
    x = inputs_of(make)
    rng = np.random.default_rng(2)
    y = rng.normal(size=(16, 1)).astype("float32")
    weights = None
    if make is masked_language_model:
        y, weights = x[:, ::-1], (x % 2).astype("float32")
    return model.fit(
        x, y, 8, sample_weight=weights, shuffle=False, verbose=0
    ).history


def compile_arguments(make):
    return {} if make is masked_language_model else {"loss": "mse"}


def tables_in(model):
    return [
        layer
        for layer in keras_models.all_layers(model)
        if isinstance(layer, keras.layers.Embedding)
    ]


@functools.cache
def reference(make):
    """Weights before and after training, the history, and predictions."""
    keras.utils.set_random_seed(3)
    model, x = make(), inputs_of(make)
    model(x)
    start = model.get_weights()
    optimizer = keras.optimizers.Adagrad(0.1)
    oracles.dense_reference(model, optimizer, **compile_arguments(make))
    history = fit(model, make)
    # Calls take a fraction of the time of `predict`, which traces.
    return start, model.get_weights(), history, model(x).numpy()


def train_and_export(folder):
    """Shards, trains and exports each of the models."""
    strategy = ks.HybridStrategy(architecture="hybrid")
    results = []
    for number, (make, start) in enumerate(starts_in(folder).items()):
        keras.utils.set_random_seed(100 + strategy.rank)
        model, x = make(), inputs_of(make)
        if model.built and strategy.rank == 0:
            model.set_weights(start)  # of rank 0 alone
        before = [v.numpy() for v in model.variables]
        sharded = ks.shard_embeddings(model)
        if not model.built:
            sharded(x)
            sharded.set_weights(start)
        tables = tables_in(sharded)
        assert {type(t) for t in tables} == {ks.layers.ShardedEmbedding}, make
        assert all(t.table.is_sharded == (strategy.size > 1) for t in tables)
        with strategy.scope():
            optimizer = keras.optimizers.Adagrad(0.1)
            sharded.compile(optimizer, **compile_arguments(make))
        history = fit(sharded, make)
        plain = ks.export(sharded)
        state = [v.numpy() for v in plain.optimizer.variables]
        for a, b in zip(state, sharded.optimizer.state(), strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(model.variables, before, strict=True):
            np.testing.assert_array_equal(a.numpy(), b)  # is left as it was
        assert_is_stock(plain)
        weights = plain.get_weights()
        np.testing.assert_array_equal(weights[0], sharded.get_weights()[0])
        whole = sharded.predict(x, verbose=0)
        results.append((len(tables), history, weights, whole))
        if strategy.rank == 0:  # alone
            np.testing.assert_allclose(plain(x), whole, atol=1e-5)
            path = os.path.join(folder, str(number))
            plain.save_weights(f"{path}.weights.h5")
            if make in SAVED_WHOLE:
                plain.save(f"{path}.keras")
                fit(plain, make)
    return results


def starts_in(folder):
    with open(os.path.join(folder, "starts"), "rb") as file:
        return pickle.load(file)


def assert_is_stock(model):
    for layer in (model, *keras_models.all_layers(model)):
        for value in (layer, *vars(layer).values()):
            assert "keras_sparsity" not in type(value).__module__, layer
    assert type(model.optimizer) is keras.optimizers.Adagrad
    assert "fit" not in vars(model)


@pytest.mark.filterwarnings("ignore:.build... was called on layer:UserWarning")
@pytest.mark.parametrize(
    ("engine", "models"),
    covering(
        [
            (engine, tuple(MODELS)[part::3])
            for engine in ("native", "horovod")
            for part in (0, 1, 2)
        ],
        # Functional and subclassed ones, and a sequential one.
        [("horovod", tuple(MODELS)[::3])],
    ),
    ids=lambda value: value if isinstance(value, str) else value[0].__name__,
)
def test_models_like_keras_examples(cluster, engine, models, tmp_path):
    starts = {make: reference(make)[0] for make in models}
    (tmp_path / "starts").write_bytes(pickle.dumps(starts))
    ranks = cluster(engine, 2).run(train_and_export, str(tmp_path), timeout=300)
    for results in ranks:
        for make, (count, *got) in zip(models, results, strict=True):
            _, weights, history, predictions = reference(make)
            assert count == MODELS[make]
            for key, values in history.items():
                np.testing.assert_allclose(
                    got[0][key], values, 1e-4, err_msg=str(make)
                )
            for a, b in zip(got[1], weights, strict=True):
                np.testing.assert_allclose(a, b, atol=2e-5, err_msg=str(make))
            np.testing.assert_allclose(got[2], predictions, atol=1e-4)
    for number, make in enumerate(models):
        x, predictions = inputs_of(make), ranks[0][number][3]
        stock = make()
        stock(x)
        stock.load_weights(tmp_path / f"{number}.weights.h5")
        np.testing.assert_allclose(stock(x), predictions, atol=1e-5)
        if make in SAVED_WHOLE:
            loaded = keras.models.load_model(
                tmp_path / f"{number}.keras", custom_objects=CLASSES
            )
            np.testing.assert_allclose(loaded(x), predictions, atol=1e-5)


# Which stock Keras saves, too: the others would need `get_config`.
SAVED_WHOLE = (text_classification, sequential)


CLASSES = {
    c.__name__: c
    for c in (
        TokenAndPositionEmbedding,
        TransformerBlock,
    )
}


def test_a_layer_with_a_table_of_its_own_is_not_exported():
    class Own(keras.layers.Layer):
        def build(self, input_shape):
            self.table = ks.ShardedTable(ITEMS, DIM, owner_name="own")
            self.rows = self.table.variable

        def call(self, ids):
            return self.table.gather(ids)

    model = keras.Sequential([keras.Input((2,), dtype="int32"), Own()])
    with pytest.raises(ValueError, match="'own' .*no counterpart in stock"):
        ks.export(model)
    copied = ks.shard_embeddings(
        keras.Sequential([model, keras.layers.Embedding(4, 2)][:1])
    )
    ids = np.array([[1, 2]])
    np.testing.assert_array_equal(copied(ids), model(ids))
    copied.layers[0].layers[0].table.assign(np.zeros((ITEMS, DIM)))
    assert np.any(model(ids))


def test_compiled_state_goes_with_the_exported_model():
    """Mixed precision, schedules and metrics of classes of the user's."""

    class Schedule(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.1

        def get_config(self):
            return {}

    class Metric(keras.metrics.Mean):
        def update_state(self, y, p, sample_weight=None):
            super().update_state(p)

    def loss(y, p):
        return keras.ops.mean((y - p) ** 2, axis=-1)

    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = ks.shard_embeddings(text_classification())
    finally:
        keras.config.set_dtype_policy("float32")
    strategy = ks.HybridStrategy()
    with strategy.scope():
        model.compile(
            keras.optimizers.Adam(Schedule()), loss, metrics=[Metric()]
        )
    x, y = inputs_of(text_classification), np.ones((16, 1), "float32")
    model.fit(x, y, verbose=0)
    plain = ks.export(model)
    assert isinstance(plain.optimizer, keras.optimizers.LossScaleOptimizer)
    assert type(plain.optimizer.inner_optimizer) is keras.optimizers.Adam
    assert plain.loss is loss
    expected = model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(plain.evaluate(x, y, verbose=0), expected, 1e-3)
    plain.fit(x, y, verbose=0)  # and trains, apart from the other
    assert int(plain.optimizer.iterations) == 2 * int(
        model.optimizer.iterations
    )


def test_of_a_fixed_delay():
    """Its `fit` is bound twice, around the stock one."""
    strategy = ks.HybridStrategy(
        synchronous=False, max_staleness=1, delay="fixed"
    )
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with strategy.scope():
        model.compile("sgd", "mse")
    x, y = np.ones((4, 2)), np.ones((4, 1))
    model.fit(x, y, verbose=0)
    plain = ks.export(model)
    assert not {"fit", "evaluate", "train_on_batch", "predict"} & {*vars(plain)}
    expected = model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(plain.evaluate(x, y, verbose=0), expected)
