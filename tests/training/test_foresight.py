"""Tables of any model pull together; what they give is in the matrix."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity._tf import keras_scopes
from tests.conftest import engines
from tests.layers.test_sharded_embedding_collection import (
    BATCH,
    MANY,
    ROWS,
    OwnStep,
    Tables,
    custom_loop,
    fitted,
    messages_of,
    table,
)
from tests.logged import with_messages_of


def stock(name):
    return keras.layers.Embedding(ROWS, 4, name=name)


@keras.saving.register_keras_serializable(package="tests")
class FunctionalOwnStep(keras.Model):
    train_step = OwnStep.train_step


def functional(number, make, kind=FunctionalOwnStep):
    ids = keras.Input((MANY,), dtype="int32")
    rows = [make(f"t{i}")(ids[:, i]) for i in range(number)]
    rows = keras.ops.sum(keras.ops.stack(rows + rows[:1]), axis=0)
    return kind(ids, keras.layers.Dense(1)(rows))


class Ids(Tables):
    """Makes the ids by layers of Keras, in a model of the model."""

    def __init__(self, number, make, is_collection):
        super().__init__(number, make, is_collection)
        self.inner = Tables(number, make, is_collection)
        self.known = keras.layers.IntegerLookup(
            vocabulary=list(range(ROWS - 1))
        )

    def call(self, inputs):
        return self.inner(self.known(tf.maximum(inputs, 2)[:, ::-1]))


class Towers(Tables):
    """Looks up rows of its second tower in its loss."""

    def __init__(self, number, make, is_collection):
        super().__init__(number, make, is_collection)
        self.items = Tables(number, make, is_collection)
        self.items(np.zeros((1, MANY), "int32"))

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        products = y_pred * self.items(x[:, ::-1])
        return super().compute_loss(x, y, products, *args, **kwargs)


class StepOfTowers(Towers):
    """Calls its towers one by one."""

    def train_step(self, batch):
        x, y, *_ = keras.utils.unpack_x_y_sample_weight(batch)
        gradients, loss = self.gradients(x, y, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}

    def gradients(self, x, y, variables):
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        return tape.gradient(loss, variables), loss


ONE = {
    "fit": (Tables, fitted, 1, stock, False),
    "own step": (OwnStep, fitted, 1, stock, False),
    "custom loop": (Tables, custom_loop, 1, stock, False),
}
MORE = [
    ("fit", Ids, fitted, 5, stock, False),
    ("own step", functional, fitted, 5, stock),
    ("own step", StepOfTowers, fitted, 5, table, False),
    ("custom loop", Tables, custom_loop, MANY, stock, False),
]
# Another step of those models, and other models of those steps.
OTHERS = [
    ("fit", Tables, fitted, MANY, stock, False),
    ("fit", functional, fitted, 5, stock, keras.Model),
    ("own step", OwnStep, fitted, 5, table, False),
    ("fit", Towers, fitted, 5, stock, False),
]


def messages(cases):
    """Messages of one table, by how it is used, and of more."""
    one = {name: messages_of(*case) for name, case in ONE.items()}
    return one, [messages_of(*case) for _, *case in cases]


@pytest.mark.parametrize(
    "cases",
    [MORE, pytest.param(OTHERS, marks=pytest.mark.all_cells)],
    ids=["more", "others"],
)
@pytest.mark.parametrize("engine", engines(usually="native"))
def test_many_tables_make_as_many_messages_as_one(engine, cluster, cases):
    for one, more in cluster(engine, 2).run(messages, cases, timeout=200):
        assert min(one.values()) > 3  # a pull and a push
        assert more == [one[name] for name, *_ in cases]


class Twice(StepOfTowers):
    """Looks rows up before its first tape, and under another one."""

    def gradients(self, x, y, variables):
        tf.reduce_mean(self(x))
        first, loss = super().gradients(x, y, variables)
        with tf.GradientTape() as tape:
            other = self.compute_loss(x, y, self.items(x))
        return list(map(added, first, tape.gradient(other, variables))), loss


class Together(StepOfTowers):
    """Has two tapes at once; one of them is of its own tower."""

    def gradients(self, x, y, variables):
        with tf.GradientTape() as first, tf.GradientTape() as second:
            loss = self.compute_loss(x, y, self(x, training=True))
            other = self.compute_loss(x, y, self.items(x))
        return list(
            map(
                added,
                first.gradient(loss, variables),
                second.gradient(other, variables),
            )
        ), loss


class Watched(StepOfTowers):
    """Tells its tape what to watch."""

    def gradients(self, x, y, variables):
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            for variable in variables:
                tape.watch(variable.value)
            loss = self.compute_loss(x, y, self(x, training=True))
        return tape.gradient(loss, variables), loss


class Reset(StepOfTowers):
    """Has its tape forget what it has recorded."""

    def gradients(self, x, y, variables):
        with tf.GradientTape() as tape:
            self(x)
            tape.reset()
            loss = self.compute_loss(x, y, self(x, training=True))
        return tape.gradient(loss, variables), loss


class Regularized(StepOfTowers):
    """Has a loss that layers add, and looks rows up in a `tf.function`."""

    def __init__(self, *args):
        super().__init__(*args)
        self.last.kernel_regularizer = keras.regularizers.L2(0.1)
        self.look_up_items = tf.function(self.items.look_up_apart)

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        rows = self.look_up_items([x[:, 0], x[:, 1]])
        y_pred = y_pred * tf.reduce_sum(rows[0] * rows[1], -1, keepdims=True)
        return super().compute_loss(x, y, y_pred, *args, **kwargs)


TOWERS = [
    *(Towers, StepOfTowers, Twice, Together),
    *(Watched, Reset, Regularized),
]


def added(a, b):
    if a is None or b is None:
        return b if a is None else a
    if not isinstance(a, tf.IndexedSlices):
        return a + b
    return tf.IndexedSlices(
        tf.concat([a.values, b.values], 0),
        tf.concat([a.indices, b.indices], 0),
        a.dense_shape,
    )


def trained(kind):
    """Weights and losses of some steps."""
    keras.utils.set_random_seed(5)
    x = np.random.default_rng(5).integers(ROWS, size=(3 * BATCH, MANY))
    y = np.ones((len(x), 1), "float32")
    model = kind(2, stock, False)
    model(x[:1].astype("int32"))
    # Stock Keras steps once for each duplicate row: of this rule, the same.
    model.compile(keras.optimizers.SGD(0.1), "mse")
    history = model.fit(x.astype("int32"), y, BATCH, shuffle=False, verbose=0)
    return model.get_weights(), history.history


def trained_on_servers(kind):
    with ks.HybridStrategy(architecture="ps").scope():
        return trained(kind)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind,
            # `Twice` does the same, and more.
            marks=[pytest.mark.all_cells] * (kind is StepOfTowers),
        )
        for kind in TOWERS
    ],
)
def test_steps_of_towers_are_those_of_one_process(kind, cluster):
    weights, logs = trained(kind)
    for found, found_logs in cluster("native", 2).run(trained_on_servers, kind):
        for own, stock in zip(found, weights, strict=True):
            np.testing.assert_allclose(own, stock, atol=1e-6)
        for name, values in logs.items():
            np.testing.assert_allclose(found_logs[name], values, rtol=1e-5)


# Calls that are not the same each time.


class Changing(Tables):
    """Gives each id to another table each time that it is called."""

    calls = 0

    def look_up_apart(self, ids):
        self.calls += 1
        first = self.calls % len(ids)
        return super().look_up_apart(ids[first:] + ids[:first])


class Once(Tables):
    """Cannot be called without values."""

    def look_up_apart(self, ids):
        if self.built and keras_scopes.in_symbolic_scope():
            raise OSError("the file has ended")
        return super().look_up_apart(ids)


class Fixed(Tables):
    """Gives a table ids, too, that are no part of the trace."""

    def look_up_apart(self, ids):
        first, *others = super().look_up_apart(ids)
        with tf.init_scope():
            fixed = tf.constant([1])
        return [first + self.tables[0](fixed), *others]


@with_messages_of("keras_sparsity.training.scouting")
def fall_back(told):
    """What is said of models, and how far their predictions are off."""
    off = []
    x = np.arange(6 * MANY).reshape(6, MANY) % ROWS
    for kind in (Changing, Once, Fixed, Tables):
        model = kind(3, table, False)
        model(x)
        with ks.HybridStrategy(architecture="ps").scope():
            model.compile("sgd", "mse")
        for _ in range(2):  # which is said once
            model.predict_function = None
            found = model.predict(x, batch_size=6, verbose=0)
        model.calls = getattr(model, "calls", 1) - 1
        off.append(abs(found - model(x).numpy()).max())
    return told, off


def test_lookups_that_are_not_foreseen(cluster):
    ranks = cluster("native", 2).run(fall_back)
    for reasons, told in zip(
        [
            ["'changing' ", "3 of its lookups are others each time"],
            ["'once' ", "traced twice, OSError: ", "the file has ended"],
        ],
        ranks[0][0],
        strict=True,
    ):
        for reason in ("pull their rows one after the other", *reasons):
            assert reason in told
    assert ranks[1][0] == []
    for _, off in ranks:
        np.testing.assert_allclose(off, 0.0, atol=1e-6)
