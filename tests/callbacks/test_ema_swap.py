"""Keras's `SwapEMAWeights` in an adopted model, with loss scaling."""

from unittest import mock

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from keras_sparsity._tf.current_variable import keeper_of
from keras_sparsity.update import rules
from tests.conftest import engines


class Seen(keras.callbacks.SwapEMAWeights):
    """Notes the weights that `evaluate` is given, and those after it."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def on_test_begin(self, logs=None):
        super().on_test_begin(logs)
        self.seen.append(self.model.get_weights())

    def on_test_end(self, logs=None):
        super().on_test_end(logs)
        self.seen.append(self.model.get_weights())


def train(embedding=keras.layers.Embedding, strategy=None, seed=1):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        keras.utils.set_random_seed(seed)
        inputs = keras.Input((4,), dtype="int32")
        rows = keras.layers.Flatten()(embedding(10, 2)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(rows))
        optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
        if strategy is None:
            model.compile(optimizer, "mse")
        else:
            with strategy.scope():
                model.compile(optimizer, "mse")
    finally:
        keras.config.set_dtype_policy("float32")
    x = np.random.default_rng(0).integers(0, 10, (8, 4))
    y = np.linspace(-1, 1, 8, dtype="float32")[:, None]
    seen = []
    callback = Seen(seen)
    for _ in range(2):  # the same callback twice
        model.fit(
            x,
            y,
            batch_size=4,
            shuffle=False,
            validation_data=(x, y),
            verbose=0,
            callbacks=[callback],
        )
    listed = keras.callbacks.CallbackList([callback], model=model)
    model.evaluate(x, y, verbose=0, callbacks=listed)
    return seen, model.layers[1]


def train_sharded(are_rows_kept):
    largest = 0 if are_rows_kept else rules._SMALL_ELEMENTS
    with mock.patch.object(rules, "_SMALL_ELEMENTS", largest):
        seen, layer = train(ks.layers.ShardedEmbedding, ks.HybridStrategy())
    keepers = [keeper_of(piece.value) for piece in layer.table.pieces]
    assert all((k is not None) == are_rows_kept for k in keepers), keepers
    return seen


def check(seen, expected):
    assert len(seen) == len(expected) == 6
    assert np.any(expected[0][0] != expected[1][0])  # which are swapped
    for a, b in zip(seen, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-4)


@pytest.mark.parametrize("are_rows_kept", [False, True])
def test_swapped_in_one_process(are_rows_kept):
    check(train_sharded(are_rows_kept), train()[0])


# A cell of `tests/test_equality.py` swaps averages on two.
@pytest.mark.all_cells
@pytest.mark.parametrize("engine", engines())
def test_swapped_on_two(cluster, engine):
    expected, _ = train()
    for are_rows_kept in (False, True):
        for seen in cluster(engine, 2).run(train_sharded, are_rows_kept):
            check(seen, expected)
