"""Functions of tests of sharded tables in a head on all workers."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.conversion.saving import tables_of

BATCH_SIZE = 8
# More of them than a small table has, see `update.rules`.
NUM_ROWS = 8209
RULES = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    # With the usual epsilon, the smallest gradients' noise makes steps.
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "clipped": lambda: keras.optimizers.Adam(
        0.01, epsilon=1e-3, global_clipnorm=0.5
    ),
    "by weight": lambda: keras.optimizers.SGD(0.1, 0.9, clipnorm=0.05),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=2.0**10
    ),
}


def recommender(regularizer=None, num_partitions=None):
    """Tables of several layers, a collection of two, and a wide tail."""
    user = keras.Input((), dtype="int32", name="user")
    items = keras.Input((None,), dtype="int32", name="items")
    words = keras.Input((4,), dtype="int32", name="words")
    layers = ks.layers
    of_user = layers.ShardedEmbedding(
        NUM_ROWS,
        6,
        embeddings_regularizer=regularizer,
        num_partitions=num_partitions,
        name="users",
    )(user)
    of_items = layers.ShardedEmbedding(31, 6, mask_zero=True, name="items_")(
        items
    )
    of_items = keras.layers.GlobalAveragePooling1D(name="mean")(of_items)
    of_words = layers.ShardedEmbeddingBag(50, 4, "sum", name="bag")(words)
    both = layers.ShardedEmbeddingCollection(
        [
            layers.ShardedEmbedding(40, 3, name="left"),
            layers.ShardedEmbedding(NUM_ROWS, 3, name="right"),
        ],
        combiners=["mean", None],
        name="both",
    )([words, user])
    x = keras.layers.Concatenate(name="all")(
        [of_user, of_items, of_words, *both]
    )
    x = keras.layers.Dense(8, activation="tanh", name="head")(x)
    x = keras.layers.Dense(40, activation="tanh", name="wide")(x)
    return keras.Model(
        [user, items, words], keras.layers.Dense(3, name="out")(x)
    )


def data(num_examples):
    draws = np.random.default_rng(1)
    return (
        [
            draws.integers(0, NUM_ROWS, num_examples),
            draws.integers(0, 31, (num_examples, 5)),
            draws.integers(0, 40, (num_examples, 4)),
        ],
        draws.integers(0, 3, num_examples),
        draws.uniform(0.5, 2, num_examples),
    )


def compiled(rule, strategy=None, is_inside=True, **options):
    """The recommender, with a strategy one that is compiled in its scope."""
    keras.utils.set_random_seed(3)
    scope = strategy.scope if strategy else contextlib.nullcontext
    with scope() if is_inside else contextlib.nullcontext():
        model = recommender(**options)
    with scope():
        model.compile(
            RULES[rule]() if strategy else of_dense(RULES[rule]()),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
        )
    return model


def of_dense(rule):
    """A rule for dense gradients: Keras's take each duplicate row as a step."""
    stock = rule.apply

    def apply(gradients, variables=None):
        return stock([tf.convert_to_tensor(g) for g in gradients], variables)

    object.__setattr__(rule, "apply", apply)
    return rule


def fit(model, num_examples, epochs=2, **options):
    return fit_on(model, data(num_examples), epochs, **options)


def fit_on(model, examples, epochs=2, **options):
    """The history of a training on `(x, y, weights)` of examples."""
    x, y, weights = examples
    return model.fit(
        *(x, y, BATCH_SIZE),
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **{"sample_weight": weights, **options},
    ).history


def results(model, num_examples):
    return results_on(model, data(num_examples))


def results_on(model, examples, **options):
    """Weights, losses and predictions of a training; as for `fit_on`."""
    history = fit_on(model, examples, **options)
    x, y, weights = examples
    return {
        "weights": model.get_weights(),
        "history": history,
        "evaluated": model.evaluate(
            x, y, BATCH_SIZE, sample_weight=weights, verbose=0
        ),
        "predicted": model.predict(x, BATCH_SIZE, verbose=0),
    }


def strategy_of(**options):
    return ks.LayerPlacementStrategy(**{"stages": ["head"], **options})


def train(rule, num_examples, options, model_options, folder=None):
    """The results of a training, and where rows are.

    With a folder also the weights of it, of a model that was saved and loaded,
    and of an exported one, when each has gone on.
    """
    strategy = strategy_of(**options)
    model = compiled(rule, strategy, **model_options)
    found = results(model, num_examples)
    tables = tables_of(model)
    found["num_rows"] = [
        sum(partition.num_rows for partition in table.partitions)
        for table in tables
    ]
    found["messages"] = {table.messages for table in tables}
    if folder is not None:
        _save(found, model, num_examples, folder)
    return found


def _save(found, model, num_examples, folder):
    """Adds the results of models that have gone on in several ways."""
    strategy = model.distribute_strategy
    model.save(f"{folder}/saved.keras")
    model.save_weights(f"{folder}/saved.weights.h5")
    plain = ks.export(model)
    with strategy.scope():
        loaded = keras.models.load_model(f"{folder}/saved.keras")
    other = compiled("sgd", strategy, is_inside=False)
    other.load_weights(f"{folder}/saved.weights.h5")
    found["loaded weights"] = other.get_weights()
    of_dense(plain.optimizer)
    for name, each in {"": model, "loaded ": loaded, "plain ": plain}.items():
        fit(each, num_examples)
        if each is loaded:  # compiled once more, with the same optimizer
            with strategy.scope():
                each.compile(each.optimizer, each.loss)
        fit(each, num_examples)
        found[f"{name}gone on"] = each.get_weights()


def checkpointed(folder, epochs, num_examples):
    """Weights after a training that goes on from a checkpoint, if any."""
    model = compiled("adam", strategy_of())
    fit(
        model,
        num_examples,
        epochs,
        callbacks=[ks.callbacks.ShardedCheckpoint(folder)],
    )
    return model.get_weights()


class OwnApply(keras.optimizers.SGD):
    """A rule that no other can stand before."""

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)


class OwnTable(keras.layers.Layer):
    """A layer of a user's that looks rows up in a sharded table."""

    def __init__(self, name):
        super().__init__(name=name)
        self.table = ks.ShardedTable(40, 3, owner_name=name)
        self.rows = self.table.variable

    def call(self, ids):
        return self.table.gather(ids)


def refused():
    """Messages of `compile`, by what it refuses."""
    strategy = strategy_of()
    in_stages = ks.PipelineStrategy("1f1b", ["all", "head"])
    rules = keras.optimizers
    built = rules.Adam()
    built.build([keras.Variable(np.zeros((2, 2)))])
    needs_whole = keras.regularizers.OrthogonalRegularizer()
    found = {}
    for name, used, rule, options in [
        ("tail", ks.LayerPlacementStrategy(["items_"]), "adam", {}),
        ("pipeline", in_stages, "adam", {}),
        ("built", strategy, built, {}),
        ("rule", strategy, rules.Lamb(), {}),
        ("scaled rule", strategy, rules.LossScaleOptimizer(rules.Lamb()), {}),
        ("own apply", strategy, OwnApply(), {}),
        ("regularizer", strategy, "adam", {"regularizer": needs_whole}),
    ]:
        with pytest.raises(ValueError) as raised, used.scope():
            recommender(**options).compile(rule, "mse")
        found[name] = str(raised.value)
    with pytest.raises(ValueError) as raised, in_stages.scope():
        ids = keras.Input((), dtype="int32")
        x = keras.layers.Dense(3, name="all")(OwnTable("own")(ids))
        x = keras.layers.Dense(3, name="head")(x)
        keras.Model(ids, keras.layers.Dense(3)(x)).compile("adam", "mse")
    found["own table"] = str(raised.value)
    _train_few(strategy, built)
    return found


def _train_few(strategy, built):
    """What is not refused: a built optimizer, and one for whole variables."""
    with strategy.scope():
        model = recommender()
        for layer in model.layers:
            layer.trainable = layer.name in ("head", "wide", "out")
        model.compile(OwnApply(), "sparse_categorical_crossentropy")
        fit(model, 8, epochs=1)
        model.compile(built, "sparse_categorical_crossentropy")


def left():
    """The results of a model that gains nothing, and its strategy's name."""
    strategy = ks.LayerPlacementStrategy(rule="published")
    model = compiled("adagrad", strategy)
    found = results(model, 17)
    return found, type(model.distribute_strategy).__name__


def fit_outside():
    """A training in which one worker is given an id outside of a table."""
    model = compiled("sgd", strategy_of())
    (user, *others), y, _ = data(BATCH_SIZE)
    user[0] = NUM_ROWS
    model.fit([user, *others], y, BATCH_SIZE, verbose=0)


def planned(num_examples):
    """The plans of the recommender, by the ways of its head's gradients."""
    x, y, _ = data(num_examples)
    dataset = tf.data.Dataset.from_tensors((tuple(x), y))
    return [
        ks.plan(compiled("sgd", strategy_of(head_gradients=way)), dataset)
        for way in ("allreduce", "server")
    ]
