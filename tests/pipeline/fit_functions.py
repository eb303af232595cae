"""Trainings that a pipeline and one process of stock Keras both run.

Each is a function of a `compile`: of a strategy's scope, or of none.
"""

import contextlib
import warnings

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity import LayerPlacementStrategy, PipelineStrategy
from tests import pipeline_functions, pipeline_oracle

_SIZE = 24


def eager(schedule, messages_ahead=False):
    """Weights after an eager training, and after a traced one."""
    found = []
    for is_eager in (True, False):
        model, strategy = (
            dense(),
            PipelineStrategy(
                schedule, ["first"], 2, messages_ahead=messages_ahead
            ),
        )
        with strategy.scope():
            model.compile("adam", "mse", run_eagerly=is_eager)
        # Of more mini-batches than are in flight.
        x, y = np.split(np.random.default_rng(0).normal(size=(40, 8)), [6], 1)
        model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
    return found


def parts():
    """Two lists of mini-batches."""
    x, y = pipeline_functions.data("line", 40)
    batches = [
        (x[begin : begin + 8].astype("float64"), y[begin : begin + 8])
        for begin in range(0, 40, 8)
    ]
    return batches[:3], batches[3:]


def in_parts():
    """Predictions and, after the second of `parts`, loss and weights.

    The first ones have weights. And the message of one without weights while
    those are in flight.
    """
    keras.config.set_floatx("float64")
    try:
        model = pipeline_functions.made("line")
        strategy = PipelineStrategy("vanilla", ["dense_1"], messages_ahead=True)
        with strategy.scope():
            model.compile(
                pipeline_oracle.RULES["momentum"](),
                keras.losses.MeanSquaredError(dtype="float64"),
            )
        first, second = parts()
        for x, y in first:
            model.train_on_batch(x, y, sample_weight=np.ones(len(x)))
        message = None
        try:
            model.train_on_batch(*second[0])
        except tf.errors.InvalidArgumentError as error:
            message = str(error)
        predicted = model.predict_on_batch(first[0][0])
        for x, y in second:
            model.train_on_batch(x, y)
        loss = model.test_on_batch(*first[0])
        return [predicted, *model.get_weights()], loss, message
    finally:
        keras.config.set_floatx("float32")


def dense(**options):
    """A model of two stages, cut after `first`."""
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", name="first", **options),
            keras.layers.Dense(2, name="last", **options),
        ]
    )


def _data():
    draws = np.random.default_rng(1)
    x = draws.normal(size=(_SIZE, 6)).astype("float32")
    return x, draws.normal(size=(_SIZE, 2)).astype("float32")


def sample_weights(compile_):
    model = dense()
    compile_(model, "adam", "mse", weighted_metrics=["mae"])
    weights = np.linspace(0.0, 2.0, _SIZE)
    history = model.fit(
        *_data(), 8, epochs=2, sample_weight=weights, shuffle=False, verbose=0
    )
    return model.get_weights(), history.history


def class_weights(compile_):
    model = dense()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compile_(model, keras.optimizers.SGD(0.5), loss)
    x, y = _data()
    history = model.fit(
        x,
        (y[:, 0] > 0).astype("int32"),
        8,
        epochs=2,
        class_weight={0: 0.25, 1: 3.0},
        shuffle=False,
        verbose=0,
    )
    return model.get_weights(), history.history


def learning_rates(compile_):
    """By a schedule, by a callback of each epoch, and on a plateau."""
    found = []
    schedule = keras.optimizers.schedules.CosineDecay(0.5, 9)
    each_epoch = keras.callbacks.LearningRateScheduler(
        lambda epoch: 0.5 / (epoch + 1)
    )
    plateau = keras.callbacks.ReduceLROnPlateau(
        "loss", factor=0.5, patience=0, min_delta=10.0
    )
    for rate, callbacks in [
        (schedule, []),
        (0.1, [each_epoch]),
        (0.25, [plateau]),
    ]:
        model = dense()
        compile_(model, keras.optimizers.SGD(rate, momentum=0.5), "mse")
        history = model.fit(
            *_data(), 8, 3, shuffle=False, verbose=0, callbacks=callbacks
        )
        found += model.get_weights()
        rates = history.history.get("learning_rate", [])
        assert len(rates) == 3 * len(callbacks)
        found.append(np.array(rates))
    return found, history.history


def shared_statistics(compile_):
    """Of layers that are called twice, in both stages."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,), name="one"), keras.Input((6,), name="other")
    x = inputs
    for layer in (
        keras.layers.BatchNormalization(momentum=0.5, name="before"),
        keras.layers.Dense(6, name="first"),
        keras.layers.BatchNormalization(momentum=0.5, name="behind"),
    ):
        x = [layer(each) for each in x]
    x = keras.layers.Dense(2)(keras.layers.Subtract()(x))
    model = keras.Model(inputs, x)
    compile_(model, keras.optimizers.SGD(0.1), "mse")
    x, y = _data()
    history = model.fit([x, x**2], y, 8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights(), history.history


def spectral_normalization(compile_):
    """A layer that assigns its kernel in each forward pass."""
    model = dense()
    last = keras.layers.SpectralNormalization(model.layers[-1])
    model = keras.Sequential([keras.Input((6,)), model.layers[0], last])
    compile_(model, "sgd", "mse")
    history = model.fit(*_data(), 8, epochs=2, shuffle=False, verbose=0)
    return model.get_weights(), history.history


def averages(compile_):
    """Weights that are averages of all steps', at the end of `fit`."""
    found = []
    rule = keras.optimizers.SGD
    for optimizer in (
        keras.optimizers.Adam(0.01, use_ema=True),
        rule(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
        keras.optimizers.LossScaleOptimizer(rule(0.1, use_ema=True)),
    ):
        model = dense()
        compile_(model, optimizer, "mse")
        history = model.fit(*_data(), 8, 3, shuffle=False, verbose=0)
        found += model.get_weights()
    return found, history.history


def single_batches(compile_):
    """`train_on_batch`, `test_on_batch` and `predict_on_batch`."""
    model = dense()
    compile_(model, "adam", "mse", metrics=["mae"])
    x, y = _data()
    logs = [
        model.train_on_batch(x[begin:end], y[begin:end], return_dict=True)
        for begin, end in [(0, 8), (8, 24)]
    ]
    tested = model.test_on_batch(x, y, return_dict=True)
    predicted = model.predict_on_batch(x)
    history = {"train": logs[-1]["loss"], "test": tested["loss"]}
    return [*model.get_weights(), predicted], history


def lengths(compile_):
    """Batches of sequences of several lengths and numbers of examples."""
    model = pipeline_functions.made("branches")
    compile_(model, keras.optimizers.SGD(0.1, momentum=0.9), ["mse", "mae"])

    def batches():
        draws = np.random.default_rng(2)  # the same in each epoch
        for number, length in [(8, 5), (4, 3), (8, 7)]:
            ids = draws.integers(1, 20, size=(number, length))
            ids[0, 2:] = 0
            yield (
                (ids, draws.normal(size=(number, 6))),
                (
                    draws.normal(size=(number, length, 3)),
                    draws.normal(size=(number, 2)),
                ),
            )

    shapes = (
        (tf.TensorSpec([None, None], "int32"), tf.TensorSpec([None, 6])),
        (tf.TensorSpec([None, None, 3]), tf.TensorSpec([None, 2])),
    )
    dataset = tf.data.Dataset.from_generator(batches, output_signature=shapes)
    number = tf.data.experimental.assert_cardinality(3)
    dataset = dataset.apply(number)
    history = model.fit(dataset, epochs=2, shuffle=False, verbose=0)
    return model.get_weights(), history.history


def one_batch_an_epoch(compile_):
    """Each epoch ends with all mini-batches back: nothing is out of date."""
    model = pipeline_functions.made("branches")
    # Of Adam, stock Keras counts duplicate rows as steps.
    compile_(model, keras.optimizers.SGD(0.1), ["mse", "mae"])
    x, y = pipeline_functions.data("branches", 8)
    history = model.fit(x, y, 8, epochs=3, verbose=0)
    return model.get_weights(), history.history


def recurrent_states(compile_):
    """Those that an epoch leaves, to the next one, and to a validation."""
    keras.utils.set_random_seed(3)
    states = keras.layers.LSTM(4, stateful=True, name="states")
    model = keras.Sequential(
        [keras.Input(batch_shape=(8, 2, 3)), states, keras.layers.Dense(2)]
    )
    compile_(model, keras.optimizers.SGD(0.5), "mse")
    x, y = (array[:8] for array in _data())
    x = x.reshape(8, 2, 3)
    history = model.fit(x, y, 8, epochs=3, validation_data=(x, y), verbose=0)
    predicted = model.predict(x, 8, verbose=0)
    return [*model.get_weights(), predicted], history.history


def unknown_number_of_batches(schedule, is_known, messages_ahead=False):
    """Weights and history; that an epoch ends is found in a step."""
    model = pipeline_functions.made("branches")
    strategy = PipelineStrategy(
        schedule, ["norm"], messages_ahead=messages_ahead
    )
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), ["mse", "mae"])
    (ids, numbers), y = pipeline_functions.data("branches", _SIZE)
    arrays = (ids, numbers), tuple(y)
    # In the second training, TensorFlow knows the shapes of all messages.
    found = []
    for number, drops in [(5, False), (6, True)]:
        dataset = tf.data.Dataset.from_tensor_slices(arrays)
        dataset = dataset.batch(number, drop_remainder=drops)
        if not is_known:
            dataset = dataset.filter(lambda x, y: True)
        with warnings.catch_warnings():
            # Keras's own, at the end of such a dataset.
            warnings.filterwarnings("ignore", ".*ran out of data")
            history = model.fit(dataset, epochs=3, shuffle=False, verbose=0)
        found.append((model.get_weights(), history.history))
    return found


def early_outputs(compile_):
    """An output of the first stage, so sure that its loss needs its logits.

    The stage has a metric, too.
    """
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="tanh", name="hidden")(inputs)
    classes = keras.layers.Dense(
        3, "softmax", name="classes", kernel_initializer="random_normal"
    )
    x = pipeline_functions.Watch()(x)
    classes = classes(keras.layers.Rescaling(400.0)(x))
    x = keras.layers.Concatenate()([x, classes])
    model = keras.Model(
        inputs, [classes, keras.layers.Dense(2, name="last")(x)]
    )
    losses = [
        keras.losses.SparseCategoricalCrossentropy(),
        keras.losses.MeanSquaredError(reduction="sum"),
    ]
    metric = keras.metrics.SparseCategoricalCrossentropy(name="crossentropy")
    compile_(model, keras.optimizers.SGD(1e-3), losses, metrics=[metric, []])
    x, y = _data()
    y = [np.arange(_SIZE) % 3, y]
    history = model.fit(x, y, _SIZE, 3, validation_data=(x, y), verbose=0)
    assert history.history["classes_crossentropy"][0] > 20
    return model.get_weights(), history.history


def small_batches(schedules):
    """Weights and losses by schedules: of 2 examples in 4 micro-batches.

    Of a dataset that does not say how many examples its batches have.
    """
    found = []
    for schedule in schedules:
        model = pipeline_functions.made("branches")
        number = pipeline_functions.NUM_MICRO_BATCHES
        with PipelineStrategy(schedule, ["norm"], number).scope():
            model.compile(
                **pipeline_functions.compile_options("branches", "momentum")
            )
        # A batch an epoch: without a flush nothing is out of date.
        x, y = pipeline_functions.data("branches", 2)
        dataset = tf.data.Dataset.from_tensor_slices((tuple(x), tuple(y)))
        dataset = dataset.batch(2).filter(lambda x, y: True)
        with warnings.catch_warnings():
            # Keras's own, at the end of such a dataset.
            warnings.filterwarnings("ignore", ".*ran out of data")
            history = model.fit(dataset, epochs=2, shuffle=False, verbose=0)
        found.append((model.get_weights(), history.history["loss"]))
    return found


def bfloat16(compile_):
    model = dense(dtype="mixed_bfloat16")
    compile_(model, keras.optimizers.SGD(0.1), "mse")
    x, y = _data()
    history = model.fit(x, y, _SIZE, epochs=3, verbose=0)
    return model.get_weights(), history.history


def swaps(compile_):
    """Validation with the averages of the weights, after each epoch."""
    model = dense()
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)
    compile_(model, optimizer, "mse")
    history = model.fit(
        *_data(),
        batch_size=8,
        epochs=2,
        validation_data=_data(),
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=True)],
    )
    return model.get_weights(), history.history


class _Noisy(keras.layers.Layer):
    """Normalizes and adds noise of no seed; its `call` takes no `training`."""

    def build(self, shape):
        self.norm = keras.layers.BatchNormalization()
        self.norm.build(shape)
        self.scale = self.add_weight(shape=shape[1:], initializer="ones")

    def call(self, x):
        return self.norm(x) + self.scale * keras.random.normal((_SIZE, 6))


def noise(compile_):
    """One batch in each epoch, so that no gradient is late."""
    first, last = dense().layers
    model = keras.Sequential(
        [keras.Input((6,)), _Noisy(name="noisy"), first, last]
    )
    compile_(model, keras.optimizers.SGD(0.1), "mse")
    history = model.fit(*_data(), _SIZE, epochs=3, verbose=0)
    return model.get_weights(), history.history


def tensorflow_noise(name):
    """Trains with noise that a second pass would draw anew."""
    model = dense()
    normal = tf.random.normal
    if name == "generator":
        normal = tf.random.Generator.from_seed(1).normal
    noisy = keras.layers.Lambda(lambda x: x + normal((6,)))
    model = keras.Sequential([keras.Input((6,)), noisy, *model.layers])
    with PipelineStrategy("vanilla", ["first"]).scope():
        model.compile("sgd", "mse")
    model.fit(*_data(), 8, verbose=0)


# Of whole kernels, of a slot for all variables, of factors; one that decays.
OPTIMIZERS = ["Adafactor", "AdamW", "Lamb", "Muon", "Nadam"]
# Of each number for itself.
MORE_OPTIMIZERS = ["Adadelta", "Adagrad", "Adamax", "Ftrl", "Lion", "RMSprop"]


def optimizers(compile_, names=OPTIMIZERS):
    """Weights of trainings by several rules."""
    found = []
    for name in names:
        if not hasattr(keras.optimizers, name):
            continue  # of a later Keras
        model = dense()
        compile_(model, getattr(keras.optimizers, name)(0.01), "mse")
        history = model.fit(*_data(), 8, 2, shuffle=False, verbose=0)
        found += model.get_weights()
    return found, history.history


def more_optimizers(compile_):
    return optimizers(compile_, MORE_OPTIMIZERS)


TRAININGS = {
    function.__name__: function
    for function in [
        sample_weights,
        class_weights,
        learning_rates,
        spectral_normalization,
        averages,
        swaps,
        single_batches,
        lengths,
        optimizers,
        more_optimizers,
        one_batch_an_epoch,
        recurrent_states,
        shared_statistics,
        early_outputs,
        bfloat16,
        noise,
    ]
}
_CUTS = {
    "lengths": ["norm"],
    "one_batch_an_epoch": ["norm"],
    "recurrent_states": ["states"],
    "early_outputs": ["classes"],
    "noise": ["noisy"],
    "spectral_normalization": [],
}


def run(
    name,
    schedule=None,
    num_micro_batches=1,
    prediction="sequential",
    messages_ahead=False,
):
    """`(arrays, history)` of a training; without a schedule in stock Keras.

    "placed" stands for `LayerPlacementStrategy`.
    """
    scope = contextlib.nullcontext
    if schedule == "placed":
        scope = LayerPlacementStrategy(_CUTS.get(name, ["first"])).scope
    elif schedule is not None:
        scope = PipelineStrategy(
            schedule,
            _CUTS.get(name, ["first"]),
            num_micro_batches,
            prediction if schedule == "spectrain" else "paper",
            messages_ahead=messages_ahead,
        ).scope

    def compile_(model, optimizer, loss, **options):
        with scope():
            model.compile(optimizer, loss, **options)

    return TRAININGS[name](compile_)


def best_batch(schedule, folder):
    """The losses of batches that a callback sees, and the best saved one's."""
    model, seen = dense(), []
    with PipelineStrategy(schedule, ["first"]).scope():
        model.compile("sgd", "mse")
    best = keras.callbacks.ModelCheckpoint(
        f"{folder}/{{loss:.2f}}.keras",
        monitor="loss",
        save_best_only=True,
        save_freq=1,
    )
    # Later versions of Keras set it at the end of an epoch.
    best.monitor_op = np.less
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(logs["loss"])
    )
    model.fit(
        *_data(), 4, epochs=2, shuffle=False, verbose=0, callbacks=[best, note]
    )
    return seen, best.best


def ended_by_nan(schedule):
    """Batches that began and history; one label of the second is NaN."""
    model = dense()
    if schedule == "placed":
        strategy = LayerPlacementStrategy(["first"])
    else:
        strategy = PipelineStrategy(schedule, ["first"], 2)
    with strategy.scope():
        model.compile("sgd", "mse")
    x, y = _data()
    y[9] = np.nan
    seen = []
    history = model.fit(
        x,
        y,
        4,
        epochs=2,
        shuffle=False,
        verbose=0,
        callbacks=[
            keras.callbacks.TerminateOnNaN(),
            keras.callbacks.LambdaCallback(
                on_train_batch_begin=lambda batch, logs: seen.append(batch)
            ),
        ],
    ).history
    return seen, len(history.get("loss", []))
