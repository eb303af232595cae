"""Trainings under `delay="bounded"`: what workers read, and values they have.

Their `fit` is that of `asynchronous_losses.train`, or of models made here.
"""

import time

import keras
import numpy as np
import tensorflow as tf

import keras_sparsity as ks
from keras_sparsity.asynchronous.own_values import OwnValues
from tests import asynchronous_losses as losses

COUNT = 26  # No multiple of 3: three workers take different numbers.


def _compiled(layers, input_shape=(1,), loss=losses.output):
    """`(strategy, model)`."""
    strategy = ks.HybridStrategy(synchronous=False, max_staleness=3)
    model = keras.Sequential([keras.Input(input_shape), *layers])
    with strategy.scope():
        model.compile(keras.optimizers.Adagrad(1.0, 0.0), loss)
    return strategy, model


def _pairs(dataset):
    return dataset.map(lambda i: tf.cast([i], tf.float32)).map(lambda x: (x, x))


def read(kind):
    """How often each batch was applied; or the error.

    Args:
        kind: "slow files": of two that are interleaved, each rank is slow to
            read another one; "permuted": each rank has an order of its own.
    """
    rank = ks.collectives.current().rank
    loss = losses.Loss(lambda number: np.float32(0), COUNT)
    _, model = _compiled([loss])

    def late(file, number):
        time.sleep(0.03 if file == rank else 0)
        return file * (COUNT // 2) + number

    def of_file(file):
        return tf.data.Dataset.range(COUNT // 2).map(
            lambda number: tf.ensure_shape(
                tf.numpy_function(late, [file, number], tf.int64), []
            )
        )

    if kind == "permuted":
        order = np.random.default_rng(rank).permutation(COUNT)
        numbers = tf.data.Dataset.from_tensor_slices(order)
    else:
        options = tf.data.Options()
        options.deterministic = False
        numbers = tf.data.Dataset.range(2).interleave(
            of_file, cycle_length=2, num_parallel_calls=2
        )
        numbers = numbers.with_options(options)
    try:
        model.fit(_pairs(numbers).batch(1), verbose=0)
    except ValueError as error:
        return str(error)
    return losses.applied(model)


class Forget(keras.callbacks.Callback):
    """Has the model forget what it has learnt, slots too, when asked.

    Args:
        method: the name of the method in which it does, of the second epoch or
            at the end of the first one.
        ranks: those on which it does.
    """

    def __init__(self, method, ranks):
        super().__init__()
        epoch = {"on_epoch_begin": 1, "on_epoch_end": 0}[method]
        if ks.collectives.current().rank in ranks:
            setattr(self, method, lambda e, logs=None: self._forget(e == epoch))

    def _forget(self, is_due):
        if is_due:
            slots = self.model.optimizer.variables
            # Not the count and the learning rate.
            for variable in [*self.model.variables, *slots[2:]]:
                variable.assign(np.zeros(variable.shape, variable.dtype))


def forgets(method, ranks):
    """How often each batch was applied since, in two of three epochs."""
    found = losses.train(
        lambda *_: time.sleep(0.002),
        epochs=3,
        callbacks=[Forget(method, ranks)],
    )
    return found[0]


class Own(keras.layers.Layer):
    """Has values that no rule updates, and a random mask.

    Attributes:
        masks: list of what a `Dropout` has left of ones, of each step.
    """

    def __init__(self):
        super().__init__()
        self.masks = []
        self.frozen = keras.layers.Dense(1, trainable=False, use_bias=False)
        self.dropout = keras.layers.Dropout(0.5)
        self.kernel = self.add_weight(shape=(), initializer="zeros")

    def build(self, shape):
        self.frozen.build(shape)
        state = {"trainable": False, "initializer": "zeros", "shape": ()}
        self.count = self.add_weight(**{**state, "dtype": "int32"})
        self.flags = self.add_weight(
            **{**state, "dtype": "bool", "shape": (COUNT,)}
        )
        self.mean = self.add_weight(**state)
        self.built = True

    def _noted(self, mask):
        time.sleep(0.02 if ks.collectives.current().rank else 0.004)
        self.masks.append(mask)
        return np.float32(0)

    def call(self, x, training=False):
        y = self.kernel * x + self.frozen(x)
        if training:
            self.count.assign(self.count + 1)
            number = tf.cast(x[0, 0], tf.int32)
            flag = tf.cast(tf.one_hot(number, COUNT), tf.bool)
            self.flags.assign(tf.logical_or(self.flags.value, flag))
            self.mean.assign(0.9 * self.mean + 0.1 * x[0, 0])
            mask = self.dropout(tf.ones([64]), training=True)
            noted = tf.numpy_function(self._noted, [mask], tf.float32)
            y += tf.ensure_shape(noted, [])
        return y


def own_values():
    """What ranks have in the end, and what each has made of it in an epoch.

    Returns:
        dict of the values; list of the numbers of this rank's steps and the
        float that it had, of each epoch; its first mask; the numbers of values
        that it has sent.
    """
    rank = ks.collectives.current().rank
    keras.utils.set_random_seed(7)
    layer, sent, stock = Own(), [], OwnValues.changed
    _, model = _compiled([layer])
    if rank:
        layer.frozen.kernel.assign([[rank + 5.0]])

    def changed(own):
        found = stock(own)
        values.append((len(layer.masks), float(layer.mean.numpy())))
        sent.append(len(found))
        return found

    values, OwnValues.changed = [], changed
    try:
        data = _pairs(tf.data.Dataset.range(COUNT)).batch(1)
        model.fit(data, epochs=2, verbose=0)
    finally:
        OwnValues.changed = stock
    found = {
        "count": int(layer.count),
        "flags": layer.flags.numpy(),
        "mean": float(layer.mean.numpy()),
        "frozen": float(layer.frozen.kernel.numpy()[0, 0]),
    }
    return found, values, layer.masks[0], sent
