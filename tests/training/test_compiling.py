"""What `compile` refuses and accepts."""

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from tests.conftest import engines

pytestmark = pytest.mark.smoke


def compile_with_xla():
    """The errors of all ways to ask for it; then training without."""
    strategy = ks.HybridStrategy()
    inputs = keras.Input((3,), dtype="int32")
    rows = ks.layers.ShardedEmbedding(10, 2)(inputs)
    model = keras.Model(inputs, keras.layers.Flatten()(rows))
    x, y = np.array([[1, 2, 3], [4, 5, 6]]), np.ones((2, 6), "float32")
    messages = []

    def attempt(function, *args, **kwargs):
        try:
            function(*args, **kwargs)
        except ValueError as error:
            messages.append(str(error))

    with strategy.scope():
        attempt(model.compile, "sgd", "mse", jit_compile=True)
        model.compile("sgd", "mse")
    model.jit_compile = True
    for name in ("fit", "evaluate", "train_on_batch", "test_on_batch"):
        attempt(getattr(model, name), x, y)
    for name in ("predict", "predict_on_batch"):
        attempt(getattr(model, name), x)
    model.jit_compile = False
    return messages, model.fit(x, y, verbose=0).history["loss"]


@pytest.mark.parametrize("engine", engines())
def test_xla_on_several_processes_is_refused(cluster, engine):
    for messages, loss in cluster(engine, 2).run(compile_with_xla):
        assert len(messages) == 7
        for message in messages:
            assert "Received: jit_compile=True on 2 processes" in message
        assert len(loss) == 1


def test_xla_in_one_process():
    messages, loss = compile_with_xla()
    assert not messages and len(loss) == 1
