"""Runs of a model in stages: a user's `CallbackList`, and generators."""

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from tests.callbacks.test_stopping import StopsOnRank1
from tests.training.test_runs import runs_on_a_generator


def listed():
    """The message about shuffled input, and the losses where rank 1 stops."""
    strategy = ks.PipelineStrategy("1f1b", ["first"], 2)
    layers = [keras.layers.Dense(2, name=name) for name in ("first", "second")]
    model = keras.Sequential([keras.Input((2,)), *layers])
    with strategy.scope():
        model.compile("sgd", "mse")

    callbacks = keras.callbacks.CallbackList(
        [StopsOnRank1()], add_history=True, model=model
    )
    x = np.arange(16.0).reshape(8, 2) / 16
    data = tf.data.Dataset.from_tensor_slices((x, x))
    history = model.fit(data.batch(4), epochs=4, callbacks=callbacks).history
    shuffled = data.shuffle(8, seed=strategy.rank).batch(2)
    try:
        model.fit(shuffled, callbacks=callbacks)
        message = ""
    except ValueError as error:
        message = str(error)
    return history["loss"], message


def test_a_list_of_callbacks(cluster):
    ranks = cluster("native", 2).run(listed)
    for losses, message in ranks:
        assert len(losses) == 2
        assert "different batches" in message or "same global" in message


def runs_in_stages():
    return runs_on_a_generator(ks.PipelineStrategy("1f1b", ["first"], 2))


def test_runs_leave_further_batches_to_a_generator(cluster):
    expected = runs_on_a_generator(ks.HybridStrategy())
    for found in cluster("native", 2).run(runs_in_stages):
        np.testing.assert_allclose(found, expected)
