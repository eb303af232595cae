"""`jit_compile=True` on several processes, against stock Keras's."""

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from keras_sparsity._tf import xla
from tests.conftest import engines
from tests.logged import with_messages_of

pytestmark = pytest.mark.smoke


def model_of(embedding):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,), dtype="int32")
    rows = keras.layers.Flatten()(embedding(50, 3, name="table")(inputs))
    hidden = keras.layers.Dense(4, "tanh", name="hidden")(rows)
    return keras.Model(inputs, keras.layers.Dense(1, name="out")(hidden))


def compile(model, **options):
    model.compile(keras.optimizers.SGD(0.2), "mse", metrics=["mae"], **options)


def results(model):
    """Logs and predictions, of more steps than come before a compilation."""
    x = np.random.default_rng(0).integers(0, 50, (32, 4))
    y = np.linspace(-1, 1, 32, dtype="float32")[:, None]
    logs = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    evaluated = model.evaluate(x[:16], y[:16], batch_size=8, verbose=0)
    predicted = model.predict(x[:16], batch_size=8, verbose=0)
    return [*logs.history.values(), evaluated, predicted]


@with_messages_of("keras_sparsity.training.jit")
def compiled(lines):
    strategy = ks.HybridStrategy(architecture="hybrid")
    asked = []
    marked = xla.compiled_between_messages

    def noting(is_asked_for):
        asked.append(is_asked_for)
        return marked(is_asked_for)

    xla.compiled_between_messages = noting
    try:
        model = model_of(ks.layers.ShardedEmbedding)
        with strategy.scope():
            compile(model, jit_compile=True)
        found = results(model)
        with strategy.scope():
            compile(model)
        x = np.zeros((8, 4))
        model.predict(x, verbose=0)
        model.jit_compile = True
        model.evaluate(x, x[:, :1], verbose=0)
    finally:
        xla.compiled_between_messages = marked
    return found, asked, lines


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_steps_are_compiled_between_messages(cluster, engine):
    stock = model_of(keras.layers.Embedding)
    compile(stock, jit_compile=True)
    expected = results(stock)
    ranks = cluster(engine, 2).run(compiled)
    for rank, (found, asked, lines) in enumerate(ranks):
        # fit, evaluate, predict; predict not; evaluate again.
        first, later = asked[:-2], asked[-2:]
        assert set(first) == {True} and later == [False, True]
        assert len(lines) == 2 * (rank == 0), lines
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    line = ranks[0][2][0]
    assert "`jit_compile=True`, on 2 processes" in line
    assert "not the messages between processes" in line


def test_one_process_is_compiled_whole():
    model = model_of(ks.layers.ShardedEmbedding)
    with ks.HybridStrategy().scope():
        compile(model, jit_compile=True)
    assert model.jit_compile
    model.predict(np.zeros((8, 4)), verbose=0)
