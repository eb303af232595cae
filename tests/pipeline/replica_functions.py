"""Functions that the processes of replicas' tests run."""

import keras
import tensorflow as tf

import keras_sparsity as ks
from tests import pipeline_functions

_SIZE = pipeline_functions.BATCH_SIZE
MOMENTUM = 0.5


def normed():
    """A model whose first stage has moving statistics."""
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((6,)),
        keras.layers.Dense(7, activation="tanh", name="dense"),
        keras.layers.BatchNormalization(momentum=MOMENTUM, name="norm"),
        keras.layers.Dense(2, name="out"),
    ]
    return keras.Sequential(layers)


def resumed(folder, replicas=2):
    """The logs of two mini-batches; weights after two more, and resumed."""
    options = {"batch_size": _SIZE, "shuffle": False, "verbose": 0}
    strategy = _strategy("spectrain", "rows", replicas)
    model = pipeline_functions.made("masks")
    with strategy.scope():
        model.compile(**pipeline_functions.compile_options("masks", "adam"))
    x, y = pipeline_functions.data("masks", 2 * _SIZE)
    history = model.fit(x, y, **options).history
    model.save(f"{folder}/model.keras")
    with strategy.scope():
        loaded = keras.models.load_model(f"{folder}/model.keras")
    for each in (model, loaded):
        each.fit(x, y, **options)
    return history, model.get_weights(), loaded.get_weights()


def _strategy(schedule, cut, replicas=2):
    return ks.PipelineStrategy(
        schedule, [cut], num_micro_batches=2, replicas=replicas
    )


def planned():
    """The plan of 8 examples, and the statistics after a step of 7.

    Statistics are None but at stage 0. With the messages of three refusals.
    """
    strategy, model = _strategy("1f1b", "norm"), normed()
    with strategy.scope():
        model.compile("sgd", "mse")
    x, y = pipeline_functions.data("dense", 8)
    data = tf.data.Dataset.from_tensors((x, y))
    plan = ks.plan(model, data)
    model.fit(x[:7], y[:7], batch_size=7, shuffle=False, verbose=0)
    norm, statistics = model.get_layer("norm"), None
    if strategy.rank < 2:
        statistics = norm.moving_mean.numpy(), norm.moving_variance.numpy()
    errors = [
        pipeline_functions.message_of(
            lambda given=given: ks.PipelineStrategy(**given)
        )
        for given in (
            {"stages": 5},
            {"replicas": 3},
            {"stages": 4, "replicas": 2},
        )
    ]
    return plan, statistics, errors
