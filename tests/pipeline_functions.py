"""Functions that the processes of pipeline tests run."""

import contextlib
import time
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity import PipelineStrategy
from keras_sparsity.pipeline.links import Link
from keras_sparsity.pipeline.versions import Predicted, Vanilla
from keras_sparsity.stages import timing
from tests import pipeline_oracle

NUM_MICRO_BATCHES = 4
BATCH_SIZE = 8
# Of a table that is not small, see `update.rules`.
NUM_ROWS = 8209


@keras.saving.register_keras_serializable("tests")
class Activity(keras.layers.Layer):
    """Adds a loss that is a mean of the examples, on each version of Keras."""

    def call(self, inputs):
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(inputs)))
        return inputs


class HalfDense(keras.layers.Dense):
    """Adds products in 32 bits.

    Some processors add them in 16, and then sums depend on the batch's size.
    """

    def call(self, inputs):
        products = keras.ops.matmul(
            *(keras.ops.cast(x, "float32") for x in (inputs, self.kernel))
        )
        products = keras.ops.cast(products, self.compute_dtype)
        return self.activation(products + self.bias)


@keras.saving.register_keras_serializable("tests")
class Watch(keras.layers.Layer):
    """Counts what it is called with."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, inputs):
        self.seen.update_state(inputs)
        return inputs


class Rounded(keras.layers.Layer):
    """Rounds activations and their gradients to 16 bits."""

    def call(self, inputs):
        @tf.custom_gradient
        def rounded(values):
            return _round(values), _round

        return rounded(inputs)


@keras.saving.register_keras_serializable("tests")
class Ids(keras.layers.Layer):
    """Ids of rows by activations."""

    def call(self, inputs):
        ids = tf.cast(tf.abs(inputs) * 30, tf.int32)
        return tf.stop_gradient(tf.minimum(ids, NUM_ROWS - 1))


class Following(keras.layers.Layer):
    """Dropout, and a weight that each pass of a training reads and changes."""

    def __init__(self, rate, seed, dtype, **kwargs):
        super().__init__(dtype=dtype, **kwargs)
        self.dropout = keras.layers.Dropout(rate, seed=seed, dtype=dtype)
        self.mean = self.add_weight(
            shape=(), initializer="zeros", trainable=False, name="mean"
        )

    def call(self, inputs, training=False):
        outputs = inputs - keras.ops.convert_to_tensor(self.mean)
        if training:
            mean = keras.ops.mean(inputs)
            self.mean.assign(0.5 * (self.mean + mean))
        return self.dropout(outputs, training=training)


class Scores(keras.layers.Layer):
    """Scores of all rows of a table that another layer looks up, as 2 sums."""

    def __init__(self, table, **kwargs):
        super().__init__(**kwargs)
        self._read = lambda: table.embeddings

    def call(self, inputs):
        scores = keras.ops.matmul(inputs, keras.ops.transpose(self._read()))
        return keras.ops.stack(
            [keras.ops.mean(scores[:, :9], 1), keras.ops.mean(scores, 1)], 1
        )


def _round(values):
    return tf.cast(tf.cast(values, tf.bfloat16), values.dtype)


def dense(rounded_after=None):
    """Layers of several kinds of losses, in one line."""
    x = inputs = keras.Input((6,))
    for i in range(4):
        if rounded_after is not None and i == rounded_after + 1:
            x = Rounded()(x)
        x = keras.layers.Dense(
            7,
            activation="tanh",
            kernel_regularizer=keras.regularizers.L2(0.1 if i < 2 else 0.0),
            name=f"dense_{i}",
        )(x)
    x = Activity(name="activity")(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="out")(x))


def branches():
    """Two inputs and outputs, masks, an LSTM, statistics, skip connections.

    And a dropout of nothing.
    """
    ids = keras.Input((None,), dtype="int32", name="ids")
    numbers = keras.Input((6,), name="numbers")
    rows = keras.layers.Embedding(20, 8, mask_zero=True, name="rows")(ids)
    states = keras.layers.LSTM(8, return_sequences=True, name="first")(rows)
    state = keras.layers.GlobalAveragePooling1D(name="second")(states)
    x = keras.layers.Dense(8, activation="relu", name="dense")(numbers)
    x = keras.layers.Dropout(0.0, name="drop")(x)
    x = keras.layers.BatchNormalization(name="norm")(x)
    both = keras.layers.Add(name="both")([state, x])
    tokens = keras.layers.Dense(3, name="tokens")(states)
    wide = keras.layers.Concatenate(name="wide")([both, x])
    skip = keras.layers.Add(name="skip")(
        [keras.layers.Dense(8, name="narrow")(wide), x]
    )
    return keras.Model(
        [ids, numbers], [tokens, keras.layers.Dense(2, name="two")(skip)]
    )


def nested():
    """A model in a model in a model, cut within; their layers' names repeat."""
    inner = keras.Sequential(
        [
            keras.Input((7,)),
            keras.layers.Dense(7, activation="tanh", name="dense"),
            Activity(name="activity"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(7, activation="tanh", name="last"),
        ],
        name="inner",
    )
    x = keras.Input((7,))
    y = keras.layers.Dense(7, name="dense")(inner(x))
    middle = keras.Model(x, keras.layers.Add(name="add")([x, y]), name="middle")
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(7, activation="tanh", name="dense"),
            middle,
            keras.layers.Dense(2, name="out"),
        ],
        name="outer",
    )


def masks():
    """Two inputs and outputs, masks, looked-up rows; no statistics."""
    ids = keras.Input((None,), dtype="int32", name="ids")
    numbers = keras.Input((6,), name="numbers")
    rows = keras.layers.Embedding(20, 8, mask_zero=True, name="rows")(ids)
    tokens = keras.layers.Dense(3, name="tokens")(rows)
    mean = keras.layers.GlobalAveragePooling1D(name="mean")(rows)
    x = keras.layers.Dense(8, activation="tanh", name="dense")(numbers)
    both = keras.layers.Add(name="both")([mean, x])
    return keras.Model(
        [ids, numbers], [tokens, keras.layers.Dense(2, name="two")(both)]
    )


def tables():
    """Two inputs and outputs, and a table on both sides of `rows`."""
    ids = keras.Input((None,), dtype="int32", name="ids")
    numbers = keras.Input((6,), name="numbers")
    mean = keras.layers.GlobalAveragePooling1D()
    rows = keras.layers.Embedding(NUM_ROWS, 4, mask_zero=True, name="rows")(ids)
    states = keras.layers.Dense(4, name="states")(rows)
    tokens = keras.layers.Dense(3, name="tokens")(states)
    more = keras.layers.Embedding(NUM_ROWS, 4, name="more")(ids)
    x = keras.layers.Dense(4, activation="tanh", name="dense")(numbers)
    both = keras.layers.Add(name="both")([mean(states), mean(more), x])
    return keras.Model(
        [ids, numbers], [tokens, keras.layers.Dense(2, name="two")(both)]
    )


def line(dtype="float64", num_states=2, is_watched=False, is_following=None):
    """What has states: weights, also untrained ones, random generators.

    And metrics, if it is watched.
    """
    if is_following is None:
        is_following = dtype == "float64"
    x = inputs = keras.Input((6,), dtype=dtype)
    options = {"dtype": dtype}
    for i in range(4):
        x = keras.layers.Dense(
            7,
            activation="tanh",
            kernel_regularizer=keras.regularizers.L2(0.0625 if i < 2 else 0.0),
            name=f"dense_{i}",
            **options,
        )(x)
        if i == 0 and is_watched:
            x = Watch(name="watch", **options)(x)
        if i == 0 and num_states:
            kind = Following if is_following else keras.layers.Dropout
            x = kind(0.25, seed=5, name="drop", **options)(x)
        if i == 1 and num_states:
            x = keras.layers.BatchNormalization(name="norm", **options)(x)
    out = keras.layers.Dense(2, name="out", **options)
    return keras.Model(inputs, out(x))


def rows_line():
    """A line with tables in the first of its stages and in the last.

    The last one's is looked up twice.
    """
    options = {"dtype": "float64"}
    flat = keras.layers.Flatten
    inputs = keras.Input((6,), **options)
    x = keras.layers.Embedding(NUM_ROWS, 4, name="rows", **options)(inputs)
    for name in ("dense_0", "dense_1"):
        layer = keras.layers.Dense(7, "tanh", name=name, **options)
        x = layer(flat(**options)(x) if name == "dense_0" else x)
    table = keras.layers.Embedding(NUM_ROWS, 4, name="more", **options)
    ids = Ids(**options)(x)
    more = [flat(**options)(table(each)) for each in (ids, ids[:, :2])]
    x = keras.layers.Concatenate(**options)([x, *more])
    return keras.Model(inputs, keras.layers.Dense(2, name="out", **options)(x))


def tied_line():
    """A line whose first stage also reads its table as a whole."""
    options = {"dtype": "float64"}
    inputs = keras.Input((6,), **options)
    table = keras.layers.Embedding(NUM_ROWS, 4, name="rows", **options)
    x = keras.layers.Flatten(**options)(table(inputs))
    x = keras.layers.Dense(4, "tanh", name="dense_0", **options)(x)
    scores = Scores(table, name="scores", **options)(x)
    return keras.Model(
        inputs, keras.layers.Dense(2, name="out", **options)(scores)
    )


def mixed():
    """Layers that compute in float16."""
    x = inputs = keras.Input((6,))
    for i in range(3):
        x = HalfDense(
            7, activation="tanh", name=f"dense_{i}", dtype="mixed_float16"
        )(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="out")(x))


MODELS = {
    "mixed": mixed,
    "dense": dense,
    "branches": branches,
    "nested": nested,
    "masks": masks,
    "tables": tables,
    "rows line": rows_line,
    "tied line": tied_line,
    "plain line": lambda: line(num_states=0),
    "line": line,
    "line32": lambda: line("float32"),
    "watched line": lambda: line("float32", is_watched=True),
    "line32 following": lambda: line("float32", is_following=True),
    "rounded": lambda: dense(rounded_after=1),
}
_OF_TWO_INPUTS = ("branches", "masks", "tables")
# Where the rows of an `Embedding` may be kept.
_MADE_INSIDE = ("tables", "rows line", "tied line")
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    # With a larger epsilon than the default, which divides rounding errors by
    # gradients that are nearly 0.
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "decayed": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    # Of a norm that all gradients together exceed, and few stages' alone.
    "clipped": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, global_clipnorm=0.5
    ),
    # It grows until gradients are infinite.
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
        initial_scale=2.0**18,
        dynamic_growth_steps=2,
    ),
}


def made(model):
    """A model of a name, always with the same weights."""
    keras.utils.set_random_seed(3)
    return MODELS[model]()


def data(model, num_examples):
    """`(x, y)` of a model."""
    draws = np.random.default_rng(1)
    numbers = draws.normal(size=(num_examples, 6)).astype("float32")
    y = draws.normal(size=(num_examples, 2)).astype("float32")
    if model in ("rows line", "tied line"):
        # Few: most of them come again, after some steps.
        numbers = draws.integers(0, 40, size=(num_examples, 6))
        return numbers.astype("float32"), y
    if model not in _OF_TWO_INPUTS:
        return numbers, y
    ids = draws.integers(1, 20, size=(num_examples, 5))
    ids[np.arange(5) >= draws.integers(1, 6, size=(num_examples, 1))] = 0
    tokens = draws.normal(size=(num_examples, 5, 3)).astype("float32")
    return [ids, numbers], [tokens, y]


def compile_options(model, optimizer):
    is_single = model not in _OF_TWO_INPUTS
    return {
        "optimizer": OPTIMIZERS[optimizer](),
        "loss": "mse" if is_single else ["mse", "mae"],
        "metrics": ["mae"] if is_single else [["mae"], ["mse"]],
    }


def trained(model, optimizer, num_examples):
    """Weights and losses of one process that accumulates micro-batches.

    In stock Keras: each micro-batch's gradient counts by its share.
    """
    options = compile_options(model, optimizer)
    network, rule = made(model), options["optimizer"]
    network.compile(**options)
    rule.build(network.trainable_variables)
    x, y = data(model, num_examples)
    losses = []
    for _ in range(2):
        total = 0.0
        for begin in range(0, num_examples, BATCH_SIZE):
            rows = np.arange(begin, min(begin + BATCH_SIZE, num_examples))
            sums = None
            for part in np.array_split(rows, NUM_MICRO_BATCHES):
                if not len(part):
                    continue
                share = len(part) / len(rows)
                with tf.GradientTape() as tape:
                    loss = share * network.compute_loss(
                        y=_rows(y, part),
                        y_pred=network(_rows(x, part), training=True),
                    )
                    scaled = rule.scale_loss(loss)
                gradients = [
                    None if g is None else tf.convert_to_tensor(g)
                    for g in tape.gradient(scaled, network.trainable_variables)
                ]
                total += float(loss) * len(rows)
                sums = gradients if sums is None else _added(sums, gradients)
            rule.apply(sums, network.trainable_variables)
        losses.append(total / num_examples)
    return {v.path: v.numpy() for v in network.weights}, losses, network


def _rows(arrays, places):
    return keras.tree.map_structure(
        lambda array: tf.convert_to_tensor(array[places]), arrays
    )


def _added(sums, gradients):
    return [
        a if b is None else b if a is None else a + b
        for a, b in zip(sums, gradients, strict=True)
    ]


def train_in_flight(*args, **options):
    """Weights, logs of batches and epochs of training without a flush."""
    keras.config.set_floatx("float64")
    try:
        return _trained_in_flight(*args, **options)
    finally:
        keras.config.set_floatx("float32")


def train_ahead(*args, **options):
    """As `train_in_flight`, with `messages_ahead`."""
    return train_in_flight(*args, messages_ahead=True, **options)


def _trained_in_flight(
    rule,
    stages,
    schedule,
    target,
    num_examples,
    model="line",
    replicas=1,
    num_micro_batches=None,
    run_eagerly=False,
    check=lambda network: None,
    messages_ahead=False,
):
    strategy = PipelineStrategy(
        schedule,
        stages,
        num_micro_batches,
        **pipeline_oracle.of_prediction(schedule, target),
        replicas=replicas,
        messages_ahead=messages_ahead,
    )
    is_inside = model in _MADE_INSIDE
    with strategy.scope() if is_inside else contextlib.nullcontext():
        network = made(model)
    with strategy.scope():
        network.compile(
            pipeline_oracle.RULES[rule](),
            keras.losses.MeanSquaredError(dtype="float64"),
            metrics=["mae"],
            run_eagerly=run_eagerly,
        )
    seen = []
    x, y = data(model, num_examples)
    history = network.fit(
        x.astype("float64"),
        y.astype("float64"),
        BATCH_SIZE,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[
            keras.callbacks.LambdaCallback(
                on_train_batch_end=lambda batch, logs: seen.append(logs["loss"])
            )
        ],
    ).history
    iterations = network.optimizer.iterations
    check(network)
    return network.get_weights(), history, seen, int(iterations)


def _adopted(
    model,
    optimizer,
    stages,
    schedule="1f1b",
    wire_dtype=None,
    replicas=1,
    num_micro_batches=None,
):
    if num_micro_batches is None and schedule in ("gpipe", "1f1b"):
        num_micro_batches = NUM_MICRO_BATCHES // replicas
    strategy = PipelineStrategy(
        schedule,
        stages,
        num_micro_batches,
        wire_dtype=wire_dtype,
        replicas=replicas,
    )
    is_inside = model in _MADE_INSIDE
    with strategy.scope() if is_inside else contextlib.nullcontext():
        network = made(model)
    with strategy.scope():
        network.compile(**compile_options(model, optimizer))
    return network


def save(folder):
    """Trains and saves; messages of reads of another stage's weights.

    By a program, by a part of an exported copy, and by a layer of the last
    stage, if the rank has it.
    """
    network = _adopted("dense", "adam", ["dense_1"])
    x, y = data("dense", 22)
    network.fit(x, y, BATCH_SIZE, epochs=2, shuffle=False, verbose=0)
    network.save(f"{folder}/model.keras")
    with open(f"{folder}/model.keras", "rb"):
        pass  # Written on all ranks' behalf before `save` returns.
    network.save_weights(f"{folder}/model.weights.h5")
    plain = ks.export(network)
    plain.save(f"{folder}/plain_{network.distribute_strategy.rank}.keras")
    other = _adopted("dense", "adam", ["dense_0"])
    other.load_weights(f"{folder}/model.weights.h5")
    rank = network.distribute_strategy.collectives.rank
    elsewhere = network.get_layer("out" if rank == 0 else "dense_0").kernel
    tied = _adopted("tied line", "sgd", ["dense_0"])
    step = tf.function(
        lambda: tied.predict_step((tf.ones((4, 6), tf.float64),)),
        autograph=False,
    )
    middle = plain.get_layer("dense_2").output
    part = keras.Model(plain.inputs, middle)
    messages = [
        message_of(elsewhere.numpy),
        # What the first one names.
        message_of(lambda: part.predict(x, verbose=0)),
        # It is traced alone, as the other rank would wait for this one.
        message_of(step.get_concrete_function),
    ]
    return network.get_weights(), other.get_weights(), messages


def train(
    model,
    optimizer,
    stages,
    schedule,
    num_examples,
    wire_dtype=None,
    replicas=1,
    check=lambda network: None,
    num_micro_batches=None,
):
    """The weights of this rank's stage, and what `fit` and the like give.

    After a function has checked the network.
    """
    network = _adopted(
        model,
        optimizer,
        stages,
        schedule,
        wire_dtype,
        replicas,
        num_micro_batches,
    )
    x, y = data(model, num_examples)
    options = {"batch_size": BATCH_SIZE, "verbose": 0}
    history = network.fit(x, y, epochs=2, shuffle=False, **options).history
    check(network)
    strategy = network.distribute_strategy
    stage = strategy.stages_of_ranks[strategy.rank]
    part = network._keras_sparsity_pipeline.parts[stage].model
    return {
        "weights": {v.path: v.numpy() for v in part.weights},
        "history": history,
        "evaluated": network.evaluate(x, y, return_dict=True, **options),
        "predicted": network.predict(x, **options),
        "all_weights": network.get_weights(),
        "scale": scale_of(network.optimizer),
    }


def scale_of(optimizer):
    """The factor of losses, and the number of steps with it."""
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return None
    return float(optimizer.dynamic_scale), int(optimizer.step_counter)


def strategies():
    """What `compile` makes of `stages`, and what it refuses, by name."""
    found = {}
    for name, stages in [
        ("measured", None),
        ("names", ["dense_1"]),
        (
            "lists",
            [
                ["dense_0", "dense_1"],
                ["dense_2", "dense_3", "activity", "out"],
            ],
        ),
    ]:
        network = made("dense")
        # Made outside of the scope.
        options = compile_options("dense", "adam")
        with PipelineStrategy("1f1b", stages).scope():
            network.compile(**options)
        found[name] = [
            part.names for part in network._keras_sparsity_pipeline.parts
        ]
    x, y = data("dense", 16)
    history = network.fit(x, y, BATCH_SIZE, verbose=0).history
    found["fitted"] = history["loss"]
    return found


def refusals():
    """The message of each model that cannot be trained in stages."""
    strategy = PipelineStrategy("spectrain", ["first"])

    def layers(*more, name="second"):
        return keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(4, name="first"),
                *more,
                keras.layers.Dense(1, name=name),
            ]
        )

    class Own(keras.Model):
        def call(self, x):
            return x

    rules, hybrid = keras.optimizers, ks.HybridOptimizer
    of_hybrid = layers()
    with ks.HybridStrategy().scope():
        of_hybrid.compile("sgd", "mse")
    trained = layers()
    with strategy.scope():
        trained.compile("sgd", "mse")
        # A second model may have shared layers on the same processes.
        first, second = trained.layers
        other = keras.layers.Dense(1, name="other")
        same = keras.Sequential([keras.Input((4,)), first, other])
        same.compile("sgd", "mse")
    third = keras.layers.Dense(1, name="third")
    ids = [keras.Input((3,)), ks.layers.ShardedEmbedding(9, 2, name="first")]
    x = np.arange(32, dtype="float32").reshape(8, 4)
    dataset = tf.data.Dataset.from_tensors((x, x[:, :1]))
    wrong = {
        "subclass": (Own(), "sgd", strategy),
        "sharded": (
            keras.Sequential([*ids, keras.layers.Dense(1)]),
            "sgd",
            strategy,
        ),
        "hybrid optimizer": (layers(), hybrid("sgd"), strategy),
        "global norm": (layers(), rules.SGD(global_clipnorm=1.0), strategy),
        "loss scaling": (
            layers(),
            rules.LossScaleOptimizer(rules.SGD()),
            strategy,
        ),
        "accumulated norm": (
            layers(),
            rules.SGD(global_clipnorm=1.0, gradient_accumulation_steps=2),
            PipelineStrategy("1f1b", ["first"]),
        ),
        "hybrid strategy": (of_hybrid, "sgd", strategy),
        "another one": (trained, "sgd", PipelineStrategy("gpipe")),
        "shared layer": (
            keras.Sequential([keras.Input((4,)), second, third], name="more"),
            "sgd",
            PipelineStrategy(stages=["second"]),
        ),
        "unknown layer": (layers(), "sgd", PipelineStrategy(stages=["third"])),
        "three stages": (
            layers(),
            "sgd",
            PipelineStrategy(stages=["first", "second"]),
        ),
        "lists": (
            layers(),
            "sgd",
            PipelineStrategy(stages=[["first"], ["third"]]),
        ),
        "repeated": (
            layers(),
            "sgd",
            PipelineStrategy(stages=[["first"], ["second", "second"]]),
        ),
        "order": (
            layers(keras.layers.Dense(4, name="between")),
            "sgd",
            PipelineStrategy(stages=[["first", "second"], ["between"]]),
        ),
    }
    rows = keras.Input((3, 4))
    folded = keras.ops.reshape(
        keras.layers.Dense(4, name="first")(rows), (-1, 4)
    )
    folded = keras.layers.Dense(4, name="second")(folded)
    wrong["rows of examples"] = keras.Model(rows, folded), "sgd", strategy
    if hasattr(rules, "MultiOptimizer"):
        several = rules.MultiOptimizer(rules.OptimizerMap(rules.SGD()))
        wrong["several optimizers"] = layers(), several, strategy
    found = {}
    for name, (model, optimizer, used) in wrong.items():
        with used.scope():
            found[name] = message_of(lambda: model.compile(optimizer, "mse"))  # noqa: B023
    with strategy.scope():
        xla = layers()
        found["xla"] = message_of(
            lambda: xla.compile("sgd", "mse", jit_compile=True)
        )

    def under_hybrid():
        with ks.HybridStrategy().scope():
            trained.compile("sgd", "mse")

    found["pipeline's"] = message_of(under_hybrid)
    found["shard"] = message_of(
        lambda: trained.fit(
            ks.data.shard(dataset.unbatch().batch(4), strategy.collectives),
            verbose=0,
        )
    )
    shuffled = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(
        8, seed=strategy.rank
    )
    found["shuffled"] = message_of(
        lambda: trained.fit(shuffled.batch(2), verbose=0)
    )
    cluster = ks.planning.Cluster(2)
    found["plan"] = message_of(lambda: ks.plan(trained, dataset, cluster))
    found["no batch"] = message_of(lambda: ks.plan(trained, dataset.take(0)))
    search = ks.callbacks.PartitionSearch()
    backup = keras.callbacks.BackupAndRestore("nowhere")
    for name, callbacks in (
        ("callback", [search]),
        ("callback of a list", keras.callbacks.CallbackList([search])),
        ("backup of a list", keras.callbacks.CallbackList([backup])),
    ):
        found[name] = message_of(
            lambda callbacks=callbacks: trained.fit(
                dataset, callbacks=callbacks, verbose=0
            )
        )
    divided = layers()
    with PipelineStrategy("1f1b", ["first"], 4).scope():
        divided.compile("sgd", "mse")
    found["small batches"] = message_of(
        lambda: divided.fit(x, x[:, :1], batch_size=2, verbose=0)
    )
    trained.compile("sgd", "mse")
    found["outside"] = message_of(lambda: trained.fit(dataset, verbose=0))
    return found


def message_of(function):
    """The message of the `ValueError` that a call raises, or None."""
    try:
        function()
    except ValueError as error:
        return str(error)
    return None


def resumed(folder):
    """Weights after 4 epochs: in one go, and loaded after the first 2."""
    x, y = data("dense", 22)
    options = {"batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0}
    network = _adopted("dense", "adam", ["dense_1"], "spectrain")
    checkpoint = keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.keras")
    network.fit(x, y, epochs=4, callbacks=[checkpoint], **options)
    strategy = PipelineStrategy("spectrain", ["dense_1"])
    network.save(f"{folder}/last.keras")
    with strategy.scope():
        keras.models.load_model(f"{folder}/last.keras")
        loaded = keras.models.load_model(f"{folder}/2.keras")
    loaded.fit(x, y, epochs=4, initial_epoch=2, **options)
    return network.get_weights(), loaded.get_weights()


def compiled_again():
    """Pairs of weights, of models that are compiled in mid-training or not.

    With a new optimizer, as if it had trained from there; and with the same
    one, whose averages of the weights' changes go on.
    """
    network = _adopted("dense", "adam", ["dense_1"], "stash")
    x, y = data("dense", 22)
    options = {"batch_size": BATCH_SIZE, "shuffle": False, "verbose": 0}
    network.fit(x, y, **options)
    between = network.get_weights()
    with network.distribute_strategy.scope():
        network.compile(**compile_options("dense", "sgd"))
    network.fit(x, y, **options)
    other = _adopted("dense", "sgd", ["dense_1"], "stash")
    other.set_weights(between)
    other.fit(x, y, **options)
    found = [(network.get_weights(), other.get_weights())]
    going_on = []
    for again in (False, True):
        network = _adopted("dense", "sgd", ["dense_1"], "spectrain")
        network.fit(x, y, **options)
        if again:
            with network.distribute_strategy.scope():
                network.compile(network.optimizer, "mse", metrics=["mae"])
        network.fit(x, y, **options)
        going_on.append(network.get_weights())
    in_flight = []
    for ends_first in (False, True):
        network = _adopted("dense", "sgd", ["dense_1"], "vanilla")
        for begin in range(0, 20, 4):
            network.train_on_batch(x[begin : begin + 4], y[begin : begin + 4])
        if ends_first:
            network.get_weights()
        with network.distribute_strategy.scope():
            network.compile(network.optimizer, "mse", metrics=["mae"])
        in_flight.append(network.get_weights())
    return [*found, going_on, in_flight]


def made_in_scope():
    """Numbers of elements of the weights that a rank holds.

    Returns:
        `(elements before compile, elements after it, whether training is that
        of a model that was made outside, all elements)`.
    """
    x, y = data("dense", 22)
    outside = _adopted("dense", "adam", ["dense_1"], "1f1b")
    strategy = outside.distribute_strategy
    with strategy.scope():
        inside = made("dense")
        before = _num_held(inside)
        inside.compile(**compile_options("dense", "adam"))
    own = _num_held(inside)
    found = []
    for network in (outside, inside):
        network.fit(x, y, batch_size=BATCH_SIZE, shuffle=False, verbose=0)
        found.append(network.get_weights())
    is_same = all(map(np.array_equal, *found))
    return before, own, is_same, sum(value.size for value in found[0])


def _num_held(network):
    """The number of elements of weights that have values here."""
    held = [v for v in network.weights if v._value is not None]
    return sum(v.shape.num_elements() for v in held)


def fitted_with_callbacks(log_dir):
    """What callbacks see, with validation, class weights and early stops.

    Returns:
        `(history, results of evaluate, weights by path, those of a
        `CallbackList` that write a file in each of two trainings)`.
    """
    keras.utils.set_random_seed(3)
    network = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu", name="first"),
            keras.layers.Dropout(0.0),
            keras.layers.Dense(3),
        ]
    )
    with PipelineStrategy("spectrain", ["first"]).scope():
        network.compile(
            keras.optimizers.Adam(
                keras.optimizers.schedules.ExponentialDecay(0.01, 10, 0.9)
            ),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    x, _ = data("dense", 64)
    labels = np.arange(64) % 3
    history = network.fit(
        x,
        labels,
        BATCH_SIZE,
        epochs=5,
        validation_data=(x, labels),
        class_weight={0: 1.0, 1: 2.0, 2: 0.5},
        verbose=0,
        callbacks=[
            keras.callbacks.EarlyStopping(
                "val_loss", patience=1, mode="max", restore_best_weights=True
            ),
            keras.callbacks.TerminateOnNaN(),
            keras.callbacks.TensorBoard(log_dir, histogram_freq=1),
        ],
    ).history
    paths = [variable.path for variable in network.weights]
    weights = dict(zip(paths, network.get_weights(), strict=True))
    evaluated = network.evaluate(x, labels, verbose=0, return_dict=True)
    kinds = []

    class Noted(keras.callbacks.CSVLogger):
        def on_train_begin(self, logs=None):
            kinds.append("CSVLogger")
            super().on_train_begin(logs)

    listed = keras.callbacks.CallbackList(
        [
            Noted(f"{log_dir}/log.csv"),
            keras.callbacks.TensorBoard(
                f"{log_dir}/listed",
                histogram_freq=1,
                # The list has it written here, in each process.
                write_graph=network.distribute_strategy.rank == 0,
            ),
        ],
        model=network,
    )
    for _ in range(2):
        network.fit(x, labels, BATCH_SIZE, callbacks=listed, verbose=0)
    return history, evaluated, weights, kinds


def planned(schedule, log_dir, messages_ahead=False):
    """The plan of eight layers of one width.

    Returns:
        `(PipelinePlan, bytes of all weights, whether none has changed, whether
        a training step is finite afterwards)`.
    """
    width = 16
    layers = [keras.layers.Dense(width, name=f"dense_{i}") for i in range(8)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    num_bytes = sum(4 * int(np.prod(v.shape)) for v in model.weights)
    strategy = PipelineStrategy(
        schedule,
        stages=["dense_1", "dense_4"],
        num_micro_batches=4,
        messages_ahead=messages_ahead,
    )
    with strategy.scope():
        model.compile(keras.optimizers.Adam(), "mse")
    before = model.get_weights()
    ones = np.ones((12, width), "float32")
    data = tf.data.Dataset.from_tensors((ones, ones))
    plan = ks.plan(model, data.repeat())
    is_same = all(map(np.array_equal, before, model.get_weights()))
    (loss,) = model.fit(data, verbose=0).history["loss"]
    if strategy.rank == 0:
        plan.write(log_dir)
    return plan, num_bytes, is_same, np.isfinite(loss)


def planned_branches():
    """The plan of a model with sequences of lengths that it does not know.

    Returns:
        `(PipelinePlan, whether no weight or statistic has changed)`.
    """
    strategy = PipelineStrategy("1f1b", stages=["second"], num_micro_batches=2)
    model = branches()
    with strategy.scope():
        model.compile("sgd", "mse")
    ids = np.ones((4, 5), "int32")
    x = ids, np.ones((4, 6), "float32")
    y = np.ones((4, 5, 3)), np.ones((4, 2))
    data = tf.data.Dataset.from_tensors((x, y))
    before = model.get_weights()
    plan = ks.plan(model, data)
    return plan, all(map(np.array_equal, before, model.get_weights()))


class Refusing(keras.layers.Dense):
    """Raises once it is told to."""

    refuses = False

    def call(self, inputs):
        if self.refuses:
            raise ValueError("ids begin at 1")
        return super().call(inputs)


def planned_often():
    """TensorFlow's warnings of several plans of the same model.

    And the error of one where the second stage raises.
    """
    layers = [Refusing(4, name=f"dense_{i}") for i in range(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    with PipelineStrategy("1f1b", stages=["dense_0"]).scope():
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((np.ones((8, 4)), np.ones((8, 4))))
    with mock.patch.object(tf.get_logger(), "handle") as handle:
        for _ in range(6):  # TensorFlow warns of the fifth trace in a row
            ks.plan(model, data)
    layers[1].refuses, error = True, None
    try:
        ks.plan(model, data)
    except RuntimeError as raised:
        error = str(raised)
    warnings = [call.args[0].getMessage() for call in handle.call_args_list]
    return warnings, error


def planned_together():
    """When a rank has traced its passes, how long it measures, and since when.

    By a clock of all processes of a machine. The second rank takes longer.

    Returns:
        `(time, list of seconds, time)`.
    """
    measured, traced, begun, asked = timing.lasting_seconds, [], [], []
    layers = [keras.layers.Dense(4, name=f"dense_{i}") for i in range(2)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    strategy = PipelineStrategy("1f1b", stages=["dense_0"])
    with strategy.scope():
        model.compile("sgd", "mse")

    def measure(run, tensors, seconds):
        if not seconds:
            time.sleep(0.2 * strategy.rank)
            traced.append(time.monotonic())
        else:
            begun.append(time.monotonic())
            asked.append(seconds)
        return measured(run, tensors, seconds)

    data = tf.data.Dataset.from_tensors((np.ones((8, 4)), np.ones((8, 4))))
    with mock.patch.object(timing, "lasting_seconds", measure):
        ks.plan(model, data)
    return max(traced), asked, min(begun)


def cut_by_slow_links(speed):
    """Of a model with one narrow place: its stages, and the links' speeds.

    Args:
        speed: by which it is cut, as of `Link.seconds_per_byte`.
    """
    layers = [
        keras.layers.Dense(size, name=f"dense_{i}")
        for i, size in enumerate([64, 2, 512, 512, 512])
    ]
    model = keras.Sequential([keras.Input((64,)), *layers])
    strategy = PipelineStrategy("1f1b")
    with mock.patch.object(Link, "seconds_per_byte", lambda link: speed):
        with strategy.scope():
            model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((np.ones((8, 64)), np.ones((8, 512))))
    plan = ks.plan(model, data)
    speeds = [link.seconds_per_byte() for link in strategy.links if link]
    return [stage.layers for stage in plan.stages], speeds


def counted(num_steps, messages_ahead=False):
    """What passes of a training without a flush compute with, as they run.

    Returns:
        missed: for each forward pass, the number of earlier mini-batches
            whose update the weights do not have.
        ahead: the numbers of updates by which weights are predicted, of a
            forward and a backward pass in turn; of the last stage, whose
            passes share theirs, of both at once.
    """
    missed, ahead = [], []
    stock_forward, stock_ahead = Vanilla.forward, Predicted._ahead

    def forward(versions, *args):
        optimizer = versions._stage.part.model.optimizer
        tf.numpy_function(
            lambda updates: missed.append(len(missed) - int(updates)),
            [tf.convert_to_tensor(optimizer.iterations)],
            [],
        )
        return stock_forward(versions, *args)

    def predicted(versions, num_updates):
        tf.numpy_function(
            lambda number: ahead.append(int(number)), [num_updates], []
        )
        return stock_ahead(versions, num_updates)

    x = np.ones((num_steps * 4, 6), "float32")
    for schedule in ("vanilla", "spectrain"):
        model = dense()
        strategy = PipelineStrategy(
            schedule,
            stages=["dense_0", "dense_1", "dense_2"],
            messages_ahead=messages_ahead,
        )
        with strategy.scope():
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
        part = model._keras_sparsity_pipeline.parts[strategy.rank]
        part.model.optimizer = model.optimizer
        with (
            mock.patch.object(Vanilla, "forward", forward),
            mock.patch.object(Predicted, "_ahead", predicted),
        ):
            model.fit(x, x[:, :2], batch_size=4, verbose=0)
    return missed, ahead


def recorded(num_steps, messages_ahead=False, num_stages=3, schedule="vanilla"):
    """The tasks of this rank's stage in a run, as `(kind, batch)`.

    The batch's number is an input of each stage. A forward pass that is
    computed again counts once; updates are numbered as they come.
    """
    tasks = []

    def note(kind, number, values):
        """The values, after a note."""

        def append(number):
            number = sum(k == kind for k, _ in tasks) if number < 0 else number
            if (kind, int(number)) not in tasks:
                tasks.append((kind, int(number)))
            return np.float32(0)

        # After what the values need, before what needs them.
        with tf.control_dependencies([values]):
            zero = tf.numpy_function(append, [number], tf.float32)
        return values + tf.reshape(zero, [])

    class Noting(keras.layers.Layer):
        def call(self, inputs):
            @tf.custom_gradient
            def noted(values, number):
                def gradient(upstream):
                    return note("backward", number, upstream), None

                return note("forward", number, values), gradient

            values, numbers = inputs
            return noted(values, numbers[0, 0])

    class NotingSGD(keras.optimizers.SGD):
        def apply(self, gradients, trainable_variables=None):
            first, *others = gradients
            first = note("update", tf.constant(-1.0), first)
            super().apply([first, *others], trainable_variables)

    x, numbers = keras.Input((6,)), keras.Input((1,))
    inputs = [x, numbers]
    for i in range(num_stages):
        x = keras.layers.Dense(4, name=f"dense_{i}")(x)
        x = Noting(name=f"note_{i}")([x, numbers])
    model = keras.Model(inputs, x)
    cuts = [f"note_{i}" for i in range(num_stages - 1)]
    strategy = PipelineStrategy(schedule, cuts, messages_ahead=messages_ahead)
    with strategy.scope():
        model.compile(NotingSGD(0.01), "mse")
    size = 4
    x = np.ones((num_steps * size, 6), "float32")
    numbers = np.repeat(np.arange(num_steps), size)[:, None]
    model.fit(
        [x, numbers.astype("float32")],
        x[:, :4],
        batch_size=size,
        shuffle=False,
        verbose=0,
    )
    return tasks


def save_stages(path, name, cuts):
    """Trains two steps and saves; then gives the weights after two more."""
    keras.utils.set_random_seed(3)
    model = made(name)
    with _in_stages(cuts).scope():
        model.compile(keras.optimizers.Adam(0.01), "mse")
    _fit_two_steps(model, name)
    model.save(path)
    _fit_two_steps(model, name)
    return model.get_weights()


def go_on_with_stages(path, name, cuts):
    """The weights of a loaded model, in other stages, after two steps."""
    with _in_stages(cuts).scope():
        model = keras.models.load_model(path)
    _fit_two_steps(model, name)
    return model.get_weights()


def _in_stages(cuts):
    return PipelineStrategy("1f1b", stages=cuts, num_micro_batches=2)


def _fit_two_steps(model, name):
    x, y = data(name, 2 * BATCH_SIZE)
    model.fit(x, y, BATCH_SIZE, shuffle=False, verbose=0)
