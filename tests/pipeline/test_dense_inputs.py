"""Sparse and ragged inputs are refused by their names, where they must be."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: ks.PipelineStrategy("1f1b"),
        lambda: ks.PipelineStrategy("vanilla"),
        lambda: ks.LayerPlacementStrategy(),
    ],
)
def test_sparse_inputs_are_refused(strategy):
    inputs = keras.Input((6,), name="words", sparse=True)
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    with strategy().scope():
        with pytest.raises(ValueError, match=r"sparse.*'words'.*to_dense"):
            model.compile("sgd", "mse")


def test_ragged_inputs_are_refused():
    if "ragged" not in inspect.signature(keras.Input).parameters:
        pytest.skip("this Keras has none")
    inputs = keras.Input((None,), dtype="int32", name="words", ragged=True)
    model = keras.Model(inputs, keras.layers.Embedding(4, 2)(inputs))
    with ks.PipelineStrategy("1f1b").scope():
        with pytest.raises(ValueError, match=r"ragged.*'words'.*to_tensor"):
            model.compile("sgd", "mse")


# Of mini-batches, the layers of whose inputs say nothing.

_RAGGED = tf.ragged.constant([[1, 2], [3], [1, 2, 3], [0]])


def _words():
    """Means of the rows of any number of words."""
    words = keras.Input((None,), dtype="int32", name="words")
    rows = keras.layers.Embedding(4, 2, name="rows")(words)
    means = keras.layers.GlobalAveragePooling1D(name="means")(rows)
    return keras.Model(words, keras.layers.Dense(1)(means))


def _data(x):
    return tf.data.Dataset.from_tensors((x, np.ones((4, 1), "float32")))


def test_sparse_batches():
    """Keras makes them dense."""
    found = []
    for x in (np.eye(4, dtype="int32"), tf.sparse.eye(4, dtype="int32")):
        keras.utils.set_random_seed(1)
        model, data = _words(), _data(x)
        with ks.PipelineStrategy("1f1b", num_micro_batches=2).scope():
            model.compile("sgd", "mse")
        losses = model.fit(data, shuffle=False, verbose=0).history["loss"]
        predicted = model.predict(data, verbose=0)[:, 0]
        found.append([*losses, model.evaluate(data, verbose=0), *predicted])
    np.testing.assert_array_equal(*found)


def test_ragged_batches_under_a_limit_of_memory():
    model = _words()
    with ks.PipelineStrategy("stash", memory_bytes=10**6).scope():
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"ragged.*'words'.*to_tensor"):
        model.fit(_data(_RAGGED), shuffle=False, verbose=0)


def trained_on_ragged():
    """Predictions where one stage has the ragged rows, and of one process.

    And messages: of a training without a flush, and of a plan whose stages
    would send ragged rows.
    """
    data, predicted = _data(_RAGGED), []
    for strategy in (ks.PipelineStrategy("1f1b", ["means"], 2), None):
        keras.utils.set_random_seed(1)
        model = _words()
        if strategy is None:
            model.compile("sgd", "mse")
        else:
            with strategy.scope():
                model.compile("sgd", "mse")
        model.fit(data, verbose=0)
        predicted.append(model.predict(data, verbose=0))
    messages = []
    for schedule, stages, run in (
        ("stash", ["means"], lambda model: model.fit(data, verbose=0)),
        ("gpipe", ["rows"], lambda model: ks.plan(model, data)),
    ):
        model = _words()
        with ks.PipelineStrategy(schedule, stages).scope():
            model.compile("sgd", "mse")
        try:
            run(model)
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    return predicted, messages


def test_ragged_batches(cluster):
    for predicted, messages in cluster("native", 2).run(trained_on_ragged):
        np.testing.assert_allclose(*predicted, rtol=1e-5)
        of_training, of_plan = messages
        assert "ragged tensor for the input 'words'" in of_training
        assert "On rank 0" in of_plan and "ends with 'rows'" in of_plan
