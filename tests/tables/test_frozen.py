"""Tables that are frozen at first, and train once they are not, as Keras's."""

import gc
import os

import keras
import numpy as np
import pytest

import keras_sparsity as ks
from keras_sparsity.health import journal
from tests.conftest import engines

X = np.arange(24).reshape(8, 3) % 19
Y = np.arange(8) % 4


def _of_stock():
    return keras.layers.Embedding(20, 4, "zeros", trainable=False)


def _of_rows():
    return ks.layers.ShardedEmbedding(20, 4, "zeros", trainable=False)


def _frozen_later():
    layer = keras.layers.Embedding(20, 4, "zeros")
    layer.build()
    layer.trainable = False
    return layer


def _compile(model, strategy):
    with strategy.scope():
        model.compile(
            keras.optimizers.SGD(0.5),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )


def _pushes(model):
    """Whether a training sends gradients of rows."""
    before = _num_pushes()
    journal.current().measures = True
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    journal.current().measures = False
    return _num_pushes() > before


def _num_pushes():
    gc.collect()  # Calls of functions that are garbage are not counted.
    return sum(
        totals.calls
        for (role, *_), totals in journal.current().totals().items()
        if role.endswith("/push/rows")
    )


def train(make, folder=None):
    """The table after a training while it is frozen, and after another one.

    Args:
        make: function that gives the layer.
        folder: where the model is saved and loaded before it is trained again.
    """
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            *(keras.Input((3,), dtype="int32"), make()),
            *(keras.layers.Flatten(), keras.layers.Dense(4)),
        ]
    )
    strategy = ks.HybridStrategy(architecture="ps")
    _compile(model, strategy)
    assert not _pushes(model)
    if folder is not None:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        model = keras.models.load_model(path)
    layer = model.layers[0]
    (before,) = layer.get_weights()
    layer.trainable = True
    _compile(model, strategy)
    assert len(model.trainable_variables) == 3
    assert _pushes(model) == (strategy.size > 1)
    return before, layer.get_weights()[0]


def train_all(folder):
    return [
        train(_of_rows),
        train(_of_stock),
        train(_frozen_later),
        train(_of_rows, folder),
    ]


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_a_frozen_table_trains_once_it_is_not(cluster, engine, tmp_path):
    expected = train(_of_stock)
    assert not expected[0].any()
    assert expected[1].any()
    for found in (
        train_all(str(tmp_path)),
        *cluster(engine, 2).run(train_all, str(tmp_path)),
    ):
        for values in found:
            np.testing.assert_allclose(values, expected, atol=1e-6)


def softmax():
    """Distance moved of the weights of a softmax that was frozen when made."""
    head = ks.layers.SampledSoftmax(20, 5, seed=2, trainable=False)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), head])
    strategy = ks.HybridStrategy(architecture="ps")
    ends = []
    for is_trained in (False, True):
        head.trainable = is_trained
        with strategy.scope():
            model.compile("sgd", head.loss())
        x = np.ones((8, 3), "float32")
        begin = head.get_weights()
        model.fit(x, Y, batch_size=4, verbose=0)
        ends.append(
            [
                np.abs(a - b).max()
                for a, b in zip(begin, head.get_weights(), strict=True)
            ]
        )
    return ends


def test_a_frozen_softmax_trains_once_it_is_not(cluster):
    for frozen, trained in (softmax(), *cluster("native", 2).run(softmax)):
        assert frozen == [0, 0]
        assert min(trained) > 0
