"""Functions that the processes of tests of shared stages run."""

from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.stages import timing
from tests import pipeline_functions
from tests.pipeline import replica_functions

# Of the two layers, as if they were measured.
SECONDS = [1.0, 9.0]


def trained(
    model, optimizer, cuts, schedule, num_examples, replicas, num_micro_batches
):
    """As `pipeline_functions.train`."""
    return pipeline_functions.train(
        *(model, optimizer, cuts, schedule, num_examples),
        replicas=replicas,
        num_micro_batches=num_micro_batches,
    )


def chosen(log_dir):
    """The plans of models whose stages are fewer than the processes.

    Returns:
        `(plans, all weights after a step)`, two lists.
    """
    plans, weights = [], []
    x = np.arange(36, dtype="float32").reshape(9, 4) / 36
    data = tf.data.Dataset.from_tensors((x, x[:, :2]))
    first = ks.PipelineStrategy()
    for strategy, seconds in [
        (first, SECONDS),
        # Its processes are divided already.
        (first, SECONDS[::-1]),
        (ks.PipelineStrategy("1f1b", 2, 3), SECONDS[::-1]),
        (ks.PipelineStrategy("gpipe", ["first"]), SECONDS),
    ]:
        model = _two_layers()
        with (
            mock.patch.object(timing, "call_seconds", lambda *_, **__: seconds),  # noqa: B023
            strategy.scope(),
        ):
            model.compile("adam", "mse", metrics=["mae"])
        plan = ks.plan(model, data)
        model.fit(data, verbose=0)
        plans.append(plan)
        weights.append(model.get_weights())
    if strategy.rank == 0:
        plans[0].write(log_dir)
    return plans, weights


def _two_layers():
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(8, activation="tanh", name="first"),
        keras.layers.Dense(2, name="second"),
    ]
    return keras.Sequential(layers)


def refused():
    """The messages of arguments that do not fit three processes."""
    found = [
        pipeline_functions.message_of(
            lambda given=given: ks.PipelineStrategy(**given)
        )
        for given in (
            {"replicas": [1, 1]},
            {"replicas": [1, 2], "stages": 3},
            {"replicas": [3, 0]},
            {"replicas": 2},
        )
    ]
    model = _two_layers()
    for given in ({"stages": ["first"], "replicas": [1, 1, 1]}, {"stages": 3}):
        with ks.PipelineStrategy(**given).scope():
            found.append(
                pipeline_functions.message_of(
                    lambda: model.compile("sgd", "mse")
                )
            )
    inputs = keras.Input(batch_shape=(8, 4), name="fixed")
    whole = keras.Model(inputs, _two_layers()(inputs))
    with ks.PipelineStrategy("stash", replicas=[1, 2]).scope():
        found.append(
            pipeline_functions.message_of(lambda: whole.compile("sgd", "mse"))
        )
    return found


def statistics():
    """Those of a shared first stage after a step of 7; None at stage 1.

    And predictions for 8 equal examples, with noise of no seed.
    """
    strategy = ks.PipelineStrategy("1f1b", ["norm"], 2, replicas=[2, 1])
    model = replica_functions.normed()
    with strategy.scope():
        model.compile("sgd", "mse")
    x, y = pipeline_functions.data("dense", 7)
    model.fit(x, y, batch_size=7, shuffle=False, verbose=0)
    noisy = keras.layers.Lambda(
        lambda x: x + keras.random.normal((tf.shape(x)[0], 1)), name="noise"
    )
    outer = keras.Sequential([keras.Input((1,)), noisy, keras.layers.Dense(1)])
    with ks.PipelineStrategy("1f1b", ["noise"], 2, replicas=[2, 1]).scope():
        outer.compile("sgd", "mse")
    predicted = outer.predict(np.ones((8, 1)), verbose=0)
    if strategy.rank == 2:
        return None, predicted
    norm = model.get_layer("norm")
    return (norm.moving_mean.numpy(), norm.moving_variance.numpy()), predicted


def limited():
    """The plan's bytes of the stages, and a step's errors by two limits."""
    x, y = pipeline_functions.data("masks", pipeline_functions.BATCH_SIZE)
    data = tf.data.Dataset.from_tensors((tuple(x), tuple(y)))
    plan = ks.plan(_masked(None), data)
    of_stages = [stage.memory_bytes for stage in plan.stages]
    errors = []
    for limit in (max(of_stages), max(of_stages) - 1):
        try:
            _masked(limit).fit(data, verbose=0)
            errors.append(None)
        except tf.errors.InvalidArgumentError as error:
            errors.append(str(error))
    return of_stages, errors


def _masked(limit):
    strategy = ks.PipelineStrategy(
        "1f1b", ["rows"], 2, replicas=[1, 2], memory_bytes=limit
    )
    model = pipeline_functions.made("masks")
    with strategy.scope():
        model.compile(**pipeline_functions.compile_options("masks", "adam"))
    return model
