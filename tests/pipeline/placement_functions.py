"""Functions that the processes of tests of layer placement run."""

import contextlib
import io
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.stages import measurements
from tests.pipeline.table_functions import BATCH_SIZE, results_on


def convolutional():
    """Statistics in the head, of all workers, and in the tail.

    Adam would make steps of the noise of a bias in front of them.
    """
    inputs = keras.Input((8, 8, 2))
    x = keras.layers.Flatten(name="flat")(_convolved(inputs))
    x = keras.layers.Dense(
        32, use_bias=False, kernel_regularizer="l2", name="wide"
    )(x)
    x = keras.layers.BatchNormalization(synchronized=True, name="tail")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="out")(x))


def _convolved(x):
    x = keras.layers.Conv2D(4, 3, use_bias=False, name="conv")(x)
    x = keras.layers.BatchNormalization(synchronized=True, name="head")(x)
    x = keras.layers.ReLU(name="relu")(x)
    return keras.layers.MaxPooling2D(name="pool")(x)


def single():
    """Statistics and draws of a tail that one worker has, of all examples."""
    inputs = keras.Input((8, 8, 2))
    x = keras.layers.Flatten(name="flat")(_convolved(inputs))
    x = keras.layers.Dense(32, use_bias=False, name="wide")(x)
    x = keras.layers.BatchNormalization(name="tail")(x)
    x = keras.layers.Dropout(0.25, seed=5, name="drop")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="out")(x))


def ids():
    """Rows in the head, with a mask; a loss of its layers."""
    x = inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(
        30, 8, mask_zero=True, embeddings_regularizer="l2", name="rows"
    )(x)
    x = keras.layers.LSTM(6, name="states")(x)
    x = keras.layers.Dense(16, kernel_regularizer="l2", name="wide")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="out")(x))


def wide():
    """A tail of layers whose columns can be divided, unevenly, or cannot."""
    x = inputs = keras.Input((6,))
    x = keras.layers.Dense(12, activation="tanh", name="first")(x)
    x = keras.layers.Dense(41, use_bias=False, name="wide")(x)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Dropout(0.25, seed=5, name="drop")(x)
    # Of all columns together.
    x = keras.layers.Dense(17, activation="softmax", name="second")(x)
    x = keras.layers.Dense(8, kernel_regularizer="l2", name="regular")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="out")(x))


MODELS = {
    "convolutional": convolutional,
    "single": single,
    "ids": ids,
    "wide": wide,
}
STAGES = {"ids": ["rows"], "wide": ["first"]}
RULES = {
    # With the usual epsilon, the smallest gradients' noise makes steps.
    "adam": lambda: keras.optimizers.Adam(
        0.01, epsilon=1e-3, global_clipnorm=0.5
    ),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, epsilon=1e-3)
    ),
}


def data(name, num_examples):
    draws = np.random.default_rng(1)
    if name == "ids":
        x = draws.integers(0, 30, (num_examples, 5))
    else:
        shape = (6,) if name == "wide" else (8, 8, 2)
        x = draws.normal(size=(num_examples, *shape)).astype("float32")
    return (
        x,
        draws.integers(0, 3, num_examples),
        draws.uniform(0.5, 2, num_examples),
    )


def compiled(name, strategy=None, rule="adam"):
    """A model, with a strategy one that is made inside of its scope."""
    keras.utils.set_random_seed(3)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = MODELS[name]()
        model.compile(**_options(rule))
    return model


def _options(rule="adam"):
    return {
        "optimizer": RULES[rule](),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "weighted_metrics": ["accuracy"],
    }


def results(model, name, num_examples):
    """Weights, losses and predictions of a training."""
    of_fit = {}
    if name == "single":
        weights = {0: 0.5, 1: 1.0, 2: 2.0}
        of_fit = {"class_weight": weights, "sample_weight": None}
    return results_on(model, data(name, num_examples), **of_fit)


def train(name, num_examples, folder, options, rule="adam"):
    """The results, and those of a model that is saved and loaded half-way."""
    strategy = ks.LayerPlacementStrategy(
        STAGES.get(name), rule="published", threshold=-0.2, **options
    )
    model = compiled(name, strategy, rule)
    found = results(model, name, num_examples)
    part = model._keras_sparsity_pipeline.parts[0]
    if strategy.size == 1:
        return found
    is_tail = strategy.stages_of_ranks[strategy.rank] == 1
    own = sum(v.value.shape.num_elements() or 0 for v in _held(model))
    model.save(f"{folder}/placed.keras")
    with strategy.scope():
        loaded = keras.models.load_model(f"{folder}/placed.keras")
    if name == "single":
        _draw_alike(model, loaded)
    for each in (model, loaded):
        x, y, _ = data(name, num_examples)
        each.fit(x, y, BATCH_SIZE, shuffle=False, verbose=0)
    return {
        **found,
        "head": part.names,
        "is_tail": is_tail,
        "num_held": own,
        "gone_on": model.get_weights(),
        "resumed": loaded.get_weights(),
    }


def train_columns(name, num_examples, folder, options, rule):
    """As `train`, with more of a tail whose columns are divided.

    Shapes of what is summed over a tail's ranks in a step; this rank's own
    values of the tail's kernels after training; the exported model's weights;
    weights after a layer was frozen and the model compiled again.
    """
    peers = []

    def noted(strategy):
        stock = strategy.peers.all_reduce

        def all_reduce(tensors, *args, **kwargs):
            peers.extend(tuple(tensor.shape) for tensor in tensors)
            return stock(tensors, *args, **kwargs)

        return mock.patch.object(strategy.peers, "all_reduce", all_reduce)

    strategy = ks.LayerPlacementStrategy(
        STAGES[name], num_examples=4, **options
    )
    with noted(strategy):
        model = compiled(name, strategy, rule)
        found = results(model, name, num_examples)
    is_tail = strategy.stages_of_ranks[strategy.rank] == 1
    kernels = [model.get_layer(x).kernel for x in ("wide", "second")]
    found["kernels"] = [v.numpy() for v in kernels if is_tail]
    found["sums"] = peers if is_tail else []
    plain = ks.export(model)
    found["exported"] = plain.get_weights()
    found["slots"] = [v.numpy() for v in plain.optimizer.variables]
    model.save(f"{folder}/columns.keras")
    with strategy.scope():
        loaded = keras.models.load_model(f"{folder}/columns.keras")
    _draw_alike(model, loaded)
    x, y, _ = data(name, num_examples)
    for each in (model, loaded):
        each.fit(x, y, BATCH_SIZE, shuffle=False, verbose=0)
    found["gone_on"] = model.get_weights()
    found["resumed"] = loaded.get_weights()
    model.get_layer("second").trainable = False
    with strategy.scope():
        model.compile(model.optimizer, model.loss)
    found["compiled_again"] = model.get_weights()
    model.fit(x, y, BATCH_SIZE, shuffle=False, verbose=0)
    found["frozen"] = model.get_weights()
    return found


def _draw_alike(model, loaded):
    # Keras does not save it.
    states = [x.get_layer("drop").seed_generator.state for x in (model, loaded)]
    states[1].assign(states[0].numpy())


def go_on_frozen(model, name, num_examples):
    """Weights of one process, trained and trained with a frozen layer."""
    x, y, _ = data(name, num_examples)
    model.fit(x, y, BATCH_SIZE, shuffle=False, verbose=0)
    before = model.get_weights()
    model.get_layer("second").trainable = False
    model.compile(model.optimizer, model.loss)
    model.fit(x, y, BATCH_SIZE, shuffle=False, verbose=0)
    return before, model.get_weights()


def planned_columns():
    """The plan of a model with a tail on two processes."""
    strategy = ks.LayerPlacementStrategy(
        STAGES["wide"], num_tail_workers=2, num_examples=4
    )
    model = compiled("wide", strategy)
    x, y, _ = data("wide", 8)
    return ks.plan(model, tf.data.Dataset.from_tensors((x, y)))


def refused_columns():
    """Messages of optimizers and models that cannot divide columns."""
    found = []
    for rule, stages in [
        (keras.optimizers.SGD(clipnorm=1.0), ["first"]),
        (keras.optimizers.Lamb(), ["first"]),
        ("sgd", ["regular"]),
    ]:
        strategy = ks.LayerPlacementStrategy(
            stages, num_tail_workers=2, tail_split="columns"
        )
        model = wide()
        if stages == ["regular"]:
            model.get_layer("out").trainable = False
        with pytest.raises(ValueError) as raised, strategy.scope():
            model.compile(rule, "mse")
        found.append(str(raised.value))
    return found


def _held(model):
    """The weights whose values this rank has."""
    weights = model._keras_sparsity_pipeline
    strategy = model.distribute_strategy
    number = strategy.stages_of_ranks[strategy.rank]
    return weights.parts[number].model.weights


def left(options):
    """The results of a model that gains nothing, and what was printed."""
    strategy = ks.LayerPlacementStrategy(**options)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model = compiled("ids", strategy)
        with strategy.scope():
            # As within the scope, so once more.
            model.compile(**_options())
            found = results(model, "ids", 22)
        x, y, _ = data("ids", 22)
        plan = ks.plan(model, tf.data.Dataset.from_tensors((x, y)))
    name = type(model.distribute_strategy).__name__
    return found, printed.getvalue(), name, plan


def planned(log_dir):
    """The plan of the convolutional model, and of where a rule divides it."""
    strategy = ks.LayerPlacementStrategy(rule="published", threshold=-0.2)
    model = compiled("convolutional", strategy)
    before = model.get_weights()
    x, y, _ = data("convolutional", 12)
    plan = ks.plan(model, tf.data.Dataset.from_tensors((x, y)))
    if strategy.rank == 0:
        plan.write(log_dir)
    is_same = all(map(np.array_equal, before, model.get_weights()))
    return plan, is_same


def shared(folder):
    """A head's weights and random state, of weights that differ by rank.

    Then those after a training, of the model and of one that was saved before
    it; empty at the tail.
    """
    strategy = ks.LayerPlacementStrategy(["drop"])
    keras.utils.set_random_seed(strategy.rank)
    kernel = keras.initializers.GlorotUniform()
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, kernel_initializer=kernel, name="head"),
            keras.layers.Dropout(0.5, name="drop"),
            keras.layers.Dense(1),
        ]
    )
    with strategy.scope():
        model.compile("sgd", "mse")
    is_head = strategy.rank < strategy.size - 1
    found = _head(model) if is_head else []
    path = f"{folder}/dropped.keras"
    ones = np.ones((8, 4)), np.ones((8, 1))
    model.fit(*ones, 4, verbose=0)
    model.save(path)
    with strategy.scope():
        loaded = keras.models.load_model(path)
    for each in (model, loaded):
        each.fit(*ones, 4, verbose=0)
        found += _head(each) if is_head else []
    return found


def _head(model):
    head, drop, _ = model.layers
    return [head.kernel.numpy(), drop.seed_generator.state.numpy()]


def divided_by_times(megabits_per_second):
    """The head's layers by predicted steps; None if it is not divided.

    Args:
        megabits_per_second: as if the links had been measured so, and each
            process had a machine.
    """
    strategy = ks.LayerPlacementStrategy(num_examples=4)
    cluster = ks.planning.Cluster(
        strategy.size, megabits_per_second=megabits_per_second
    )
    with mock.patch.object(measurements, "_with_links", lambda *_: cluster):
        model = compiled("convolutional", strategy)
    adoption = getattr(model, "_keras_sparsity_pipeline", None)
    return adoption and adoption.parts[0].names


def too_many_tails(number, options=None):
    """The message where so many processes would train the tail."""
    with pytest.raises(ValueError) as raised:
        ks.LayerPlacementStrategy(num_tail_workers=number, **options or {})
    return str(raised.value)
