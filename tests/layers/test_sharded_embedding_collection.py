"""Collections of features against stock Keras, and their messages."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.health import journal
from keras_sparsity.layers.bags import COMBINERS
from tests.conftest import engines

ROWS, DIM, BATCH, MANY = 30, 4, 8, 6
BAGS = [[1, 2, 2], [5], [3], [0, 7, 0, 9]]
WEIGHTS = [[0.5, 2.0, 1.0], [1.5], [3.0], [1.0, 0.0, -0.5, 2.0]]


def table(name, rows=ROWS, dim=DIM, seed=1, **options):
    start = keras.initializers.RandomUniform(seed=seed)
    return ks.layers.ShardedEmbedding(rows, dim, start, name=name, **options)


def lookup(layer, combiner):
    """Vectors of `BAGS`, by TensorFlow: without weights, and with them."""
    whole = tf.constant(layer.get_weights()[0])
    ids = tf.ragged.constant(BAGS).to_sparse()
    return [
        tf.nn.embedding_lookup_sparse(whole, ids, weights, combiner=combiner)
        for weights in (None, tf.ragged.constant(WEIGHTS).to_sparse())
    ]


@pytest.mark.parametrize("kind", [dict, list])
def test_as_stock_keras_and_tensorflow_look_up(kind):
    items, users = table("items"), table("users", 9, 6, seed=2)
    layers, combiners = [users, items], [None, None]
    for combiner in COMBINERS:
        layers, combiners = [*layers, items], [*combiners, combiner]
    names = list("zyxwv")
    made = (
        (lambda v: dict(zip(names, v, strict=True))) if kind is dict else list
    )
    collection = ks.layers.ShardedEmbeddingCollection(
        made(layers), made(combiners)
    )
    bags, weights = tf.ragged.constant(BAGS), tf.ragged.constant(WEIGHTS)
    asked = tf.ragged.constant([[3], [], [8, 8]])
    for of_ids in (tf.identity, tf.RaggedTensor.to_sparse):
        of_bags, of_weights = of_ids(bags), of_ids(weights)
        found = collection(made([asked, np.array([7, 7]), *[of_bags] * 3]))
        weighted = collection(
            made([np.array([2]), np.array([[4, 5]]), *[of_bags] * 3]),
            weights=made([None, None, *[of_weights] * 3]),
        )
        assert type(found) is kind and len(collection.weights) == 2
        found, weighted = (
            [x[n] for n in (names if kind is dict else range(5))]
            for x in (found, weighted)
        )
        whole = items.get_weights()[0]
        np.testing.assert_array_equal(found[1], whole[[7, 7]])
        np.testing.assert_array_equal(weighted[1], whole[[[4, 5]]])
        whole = users.get_weights()[0]
        np.testing.assert_array_equal(found[0].values, whole[[3, 8, 8]])
        assert found[0].row_lengths().numpy().tolist() == [1, 0, 2]
        np.testing.assert_array_equal(weighted[0], whole[[2]])
        for index, combiner in enumerate(COMBINERS, start=2):
            for one, other in zip(
                (found[index], weighted[index]),
                lookup(items, combiner),
                strict=True,
            ):
                np.testing.assert_allclose(one, other, rtol=1e-5)


def test_masks_are_those_of_stock_embeddings():
    stock = keras.layers.Embedding(ROWS, DIM, mask_zero=True)
    collection = ks.layers.ShardedEmbeddingCollection(
        {"masked": table("masked", mask_zero=True), "whole": table("whole")}
    )
    ids = np.array([[3, 0, 1], [0, 0, 2]])
    found = collection({"masked": ids, "whole": ids})
    np.testing.assert_array_equal(
        found["masked"]._keras_mask, stock(ids)._keras_mask
    )
    assert getattr(found["whole"], "_keras_mask", None) is None


def test_a_combiner_takes_one_id_of_each_example():
    collection = ks.layers.ShardedEmbeddingCollection([table("a")], ["mean"])
    (found,) = collection([np.array([3, 4])])
    whole = collection.embeddings[0].get_weights()[0]
    np.testing.assert_allclose(found, whole[[3, 4]])


def test_padding_is_left_out_of_bags():
    collection = ks.layers.ShardedEmbeddingCollection(
        [table("a", mask_zero=True)], ["mean"]
    )
    (found,) = collection([np.array([[3, 0, 5, 0]])])
    whole = collection.embeddings[0].get_weights()[0]
    np.testing.assert_allclose(found, whole[[3, 5]].mean(0, keepdims=True))


def test_arguments_of_keras_rs():
    def config(name, combiner, **options):
        named = {"name": name, "vocabulary_size": ROWS, "embedding_dim": DIM}
        return types.SimpleNamespace(
            **named, combiner=combiner, initializer="ones", **options
        )

    def feature(table):
        return types.SimpleNamespace(name="feature", table=table)

    summed = config("summed", "sum", placement="auto", optimizer=None)
    collection = ks.layers.ShardedEmbeddingCollection(
        {
            "a": feature(summed),
            "b": feature(summed),
            "c": feature(config("averaged", "mean")),
        }
    )
    ids = np.array([[1, 2], [3, 3]])
    found = collection({"a": ids, "b": np.array([4, 5]), "c": ids})
    assert [v.path.split("/")[-2] for v in collection.weights] == [
        "summed",
        "averaged",
    ]
    assert found["a"].numpy().tolist() == [[2.0] * DIM] * 2
    assert found["b"].numpy().tolist() == [[1.0] * DIM] * 2
    assert found["c"].numpy().tolist() == [[1.0] * DIM] * 2
    with pytest.raises(ValueError, match="optimizer is not supp.*'own'.*'sgd'"):
        ks.layers.ShardedEmbeddingCollection(
            [feature(config("own", "sum", optimizer="sgd"))]
        )


class Subclassed(keras.Model):
    """A model of users, items and the items that they have seen."""

    def __init__(self, look_up):
        super().__init__()
        self.look_up = look_up
        start = keras.initializers.GlorotUniform(seed=3)
        self.last = keras.layers.Dense(1, kernel_initializer=start)

    def call(self, inputs):
        user, item, seen = keras.ops.split(inputs, [1, 2], axis=1)
        rows = self.look_up(
            {"user": user[:, 0], "item": item[:, 0], "seen": seen}
        )
        flat = [rows["user"], rows["item"], rows["seen"]]
        return self.last(keras.ops.concatenate(flat, axis=1))


class Stock(keras.layers.Layer):
    """The same lookups by stock layers."""

    def __init__(self):
        super().__init__()
        of = keras.initializers.RandomUniform
        self.users = keras.layers.Embedding(ROWS, 2 * DIM, of(seed=2))
        self.items = keras.layers.Embedding(ROWS, DIM, of(seed=1))

    def call(self, ids):
        return {
            "user": self.users(ids["user"]),
            "item": self.items(ids["item"]),
            "seen": keras.ops.mean(self.items(ids["seen"]), axis=1),
        }


def collected():
    items = table("items")
    return ks.layers.ShardedEmbeddingCollection(
        {
            "user": table("users", dim=2 * DIM, seed=2),
            "item": items,
            "seen": items,
        },
        combiners={"seen": "mean"},
        name="collection",
    )


def functional():
    ids = keras.Input((5,), dtype="int32")
    return keras.Model(ids, Subclassed(collected()).call(ids))


def data():
    x = np.random.default_rng(4).integers(ROWS, size=(5 * BATCH, 5))
    return x.astype("int32"), (x.sum(axis=1) % 7).astype("float32")


def trained(model):
    """Losses and weights of a run, and predictions."""
    x, y = data()
    options = {"batch_size": BATCH, "verbose": 0}
    history = model.fit(x, y, epochs=2, shuffle=False, **options)
    losses, weights = history.history["loss"], model.get_weights()
    return [*losses, *weights, model.predict(x, **options)]


def own():
    return Subclassed(collected())


def train(make, **options):
    with ks.HybridStrategy(**options).scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    return trained(model)


def train_all():
    return (
        train(own),
        train(functional, architecture="hybrid"),
        train(functional, architecture="hybrid", prefetch=True),
    )


@pytest.fixture(scope="module")
def stock():
    model = Subclassed(Stock())
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    return trained(model)


def check(found, stock):
    for one, other in zip(found, stock, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_several_processes_train_as_stock_keras(engine, cluster, stock):
    for results in cluster(engine, 2).run(train_all):
        for found in results:
            check(found, stock)
        _, plain, prefetched = results
        for one, other in zip(plain, prefetched, strict=True):
            np.testing.assert_array_equal(one, other)


# Messages through machines know of no layers: `tests/exchange`.
@pytest.mark.all_cells
def test_machines_of_two_processes_train_as_stock_keras(cluster, stock):
    for found in cluster("native", 4, machines=2).run(train, own):
        check(found, stock)


def test_one_process_trains_as_stock_keras(stock):
    check(train(own), stock)


@pytest.mark.smoke
def test_saved_and_exported(tmp_path):
    x, _ = data()
    graph = functional()
    path = tmp_path / "model.keras"
    graph.save(path)
    loaded = keras.models.load_model(path)
    assert [w.shape for w in loaded.weights] == [w.shape for w in graph.weights]
    subclassed = own()
    subclassed(x)
    for model, others in (
        (graph, [loaded, ks.export(graph)]),
        (subclassed, [ks.export(subclassed)]),
    ):
        expected = model.predict(x, verbose=0)
        for other in others:
            np.testing.assert_allclose(
                other.predict(x, verbose=0), expected, rtol=1e-6
            )
    kinds = {type(layer).__module__ for layer in others[0]._flatten_layers()}
    assert not any(kind.startswith("keras_sparsity") for kind in kinds)


def test_exported_for_bags_of_another_length():
    class Sum(keras.Model):
        def __init__(self):
            super().__init__()
            self.collection = ks.layers.ShardedEmbeddingCollection(
                [table("a"), table("b")], ["mean", "sum"]
            )

        def call(self, ids):
            first, whole = self.collection([ids[:, 0], ids])
            return first + whole

    model = Sum()
    model(np.array([[1, 2, 3]]))
    longer = np.array([[4, 5, 6, 7], [8, 9, 0, 0]])
    expected = model(longer)
    np.testing.assert_allclose(ks.export(model)(longer), expected, rtol=1e-6)


def kept(folder):
    """Weights after a run, and of a model that takes its checkpoint."""
    x, y = data()
    models = [own(), own()]
    for model in models:
        with ks.HybridStrategy(architecture="hybrid").scope():
            model.compile("adam", "mse")
        model.predict(x, verbose=0)
    checkpoint = ks.callbacks.ShardedCheckpoint(folder)
    models[0].fit(x, y, callbacks=[checkpoint], verbose=0)
    checkpoint.restore(models[1])
    return [model.get_weights() for model in models]


# On other workers, too: `tests/pipeline/test_tables.py`.
@pytest.mark.all_cells
def test_kept_in_checkpoints(cluster, tmp_path):
    for trained, restored in cluster("native", 2).run(kept, str(tmp_path)):
        for one, other in zip(trained, restored, strict=True):
            np.testing.assert_array_equal(one, other)


def test_collections_with_weights_are_not_exported():
    ids, weights = keras.Input((5,), dtype="int32"), keras.Input((5,))
    collection = ks.layers.ShardedEmbeddingCollection(
        [table("a")], ["sum"], name="collection"
    )
    model = keras.Model([ids, weights], collection([ids], weights=[weights]))
    with pytest.raises(ValueError, match="'collection' is called with weights"):
        ks.export(model)


def looked_up_in_a_loop():
    """Rows of collections that are called in a loop of a step, summed."""
    strategy = ks.HybridStrategy()
    collection = collected()
    collection.build()
    x, _ = data()

    @tf.function
    def step(x):
        total = tf.zeros([DIM])
        for index in tf.range(3):
            ids = x[index : index + 1]
            rows = collection(
                {"user": ids[:, 0], "item": ids[:, 1], "seen": ids}
            )
            total += rows["item"][0] + rows["seen"][0]
        return total

    with strategy.scope():
        for layer in collection.embeddings:
            layer.table.shard(strategy.placements)
        total = strategy.run(step, args=(tf.constant(x),))
    whole = collection.embeddings[1].table.read()
    return total.numpy(), whole


def test_in_a_loop_of_a_step(cluster):
    x, _ = data()
    for found, whole in cluster("native", 2).run(looked_up_in_a_loop):
        expected = sum(whole[row[1]] + whole[row].mean(axis=0) for row in x[:3])
        np.testing.assert_allclose(found, expected, rtol=1e-5)


# Messages.


class Tables(keras.Model):
    """A subclassed model of several tables."""

    def __init__(self, number, make=table, is_collection=True):
        super().__init__()
        self.tables = [make(f"t{i}") for i in range(number)]
        self.look_up = self.look_up_apart
        if is_collection:
            self.look_up = ks.layers.ShardedEmbeddingCollection(self.tables)
        self.last = keras.layers.Dense(1)

    def look_up_apart(self, ids):
        return [t(i) for t, i in zip(self.tables, ids, strict=True)]

    def call(self, inputs):
        rows = self.look_up([inputs[:, i] for i in range(len(self.tables))])
        return self.last(keras.ops.sum(keras.ops.stack(rows), axis=0))


class OwnStep(Tables):
    """With a `train_step` of its own."""

    def train_step(self, batch):
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = self.compute_loss(x, y, found, weights)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return {"loss": loss}


def custom_loop(model, x, y):
    """A function that takes some steps in a loop of the user's."""
    strategy = tf.distribute.get_strategy()
    optimizer = ks.HybridOptimizer("sgd")

    @tf.function
    def step(x, y):
        def replica_step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - y))
            variables = model.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

        strategy.run(replica_step, args=(x, y))

    def run(steps):
        for _ in range(steps):
            step(tf.constant(x), tf.constant(y))

    return run


def fitted(model, x, y):
    model.compile("sgd", "mse")

    def run(steps):
        for _ in range(steps):
            model.train_on_batch(x, y)

    return run


def messages_of(make, runs, *args, architecture="ps"):
    """Messages of all kinds in a step."""
    x = np.random.default_rng(5).integers(ROWS, size=(BATCH, MANY))
    y = np.ones((BATCH, 1), "float32")
    journal.current().measures = True
    with ks.HybridStrategy(architecture=architecture).scope():
        run = runs(make(*args), x.astype("int32"), y)
        run(1)
        before = count()
        run(3)
        found = count() - before
    journal.current().measures = False
    return found / 3


def count():
    return sum(t.calls for t in journal.current().totals().values())


def messages():
    """Messages of one table and of many."""
    return {
        name: [messages_of(make, runs, number) for number in (1, MANY)]
        for name, make, runs in [
            ("subclassed", Tables, fitted),
            ("own step", OwnStep, fitted),
            ("custom loop", Tables, custom_loop),
        ]
    }


@pytest.mark.parametrize("engine", engines(usually="horovod"))
def test_many_tables_make_as_many_messages_as_one(engine, cluster):
    for found in cluster(engine, 2).run(messages):
        for one, many in found.values():
            assert one == many > 3  # a pull and a push
