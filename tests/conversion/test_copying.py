"""Copies of objects that refer to layers, in every way that users write."""

import collections
import functools

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity.conversion.copying import Copier


def nothing_replaced(copier, value):
    return None


def copy(value):
    return Copier(nothing_replaced).copy(value)


Pair = collections.namedtuple("Pair", ["layer", "number"])


class Holder:
    """An object of the user's, which is no layer."""

    def __init__(self, layer):
        self.layer = layer
        self.again = [layer, {"key": (layer, 3)}]
        self.array = np.arange(3)


def dense():
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    return layer


def test_each_object_is_copied_once():
    layer = dense()

    def call(x, factor=2.0):
        return layer(x) * factor

    made = {
        "holder": Holder(layer),
        "closure": call,
        "method": layer.call,
        "partial": functools.partial(call, factor=3.0),
        "pair": Pair(layer, 1),
        "deque": collections.deque([layer]),
        "default": collections.defaultdict(list, a=[layer]),
        "ordered": collections.OrderedDict(b=layer, a=1),
        "set": {layer},
    }
    copied = copy(made)
    new = copied["holder"].layer
    assert type(new) is keras.layers.Dense and new is not layer
    assert copied["holder"].again[0] is copied["holder"].again[1]["key"][0]
    assert copied["holder"].again[0] is new
    assert copied["holder"].array is made["holder"].array
    assert copied["method"].__self__ is new
    assert copied["pair"] == Pair(new, 1)
    assert list(copied["deque"]) == copied["default"]["a"] == [new]
    assert copied["default"]["other"] == []
    assert list(copied["ordered"].items()) == [("b", new), ("a", 1)]
    assert copied["set"] == {new}
    x = np.ones((1, 3), "float32")
    before = layer(x).numpy()
    new.set_weights([np.zeros((3, 2)), np.zeros(2)])
    assert not np.any(copied["closure"](x)) and not np.any(copied["partial"](x))
    np.testing.assert_array_equal(layer(x), before)
    np.testing.assert_array_equal(made["partial"](x), before * 3)


def test_what_has_no_layers_is_shared():
    shared = [[1, 2], {"a": np.ones(2)}, len, np, tf.data.Dataset.range(3)]
    seen = []

    def notes(x):
        seen.append(x)

    layer = keras.layers.Lambda(lambda x: x)
    layer.function = notes
    layer.values = (shared, notes)
    copied = copy([layer])[0]
    assert copied.function is notes
    assert copied.values[1] is notes


def test_cycles_and_deep_graphs():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    holder = Holder(dense())
    holder.itself, holder.even = holder, even
    copied = copy(holder)
    assert copied.itself is copied and copied.layer is not holder.layer
    assert copied.even(4)
    inputs = outputs = keras.Input((2,))
    for _ in range(300):
        outputs = keras.layers.Identity()(outputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(outputs))
    copied = copy(model)
    x = np.ones((1, 2), "float32")
    np.testing.assert_array_equal(copied(x), model(x))


def test_a_copied_model_is_one_of_its_own(tmp_path):
    """It trains, saves, is checkpointed and exported apart from the other."""

    class Own(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = [keras.layers.Dense(3), keras.layers.Dropout(0.5)]
            self.by_name = {"last": (keras.layers.BatchNormalization(),)}
            self.count = tf.Variable(0.0, trainable=False)

        def call(self, x, training=False):
            self.count.assign_add(1.0)
            for layer in self.inner:
                x = layer(x, training=training)
            return self.by_name["last"][0](x, training=training)

    def make():
        inputs = keras.Input((2,))
        return keras.Model(inputs, keras.layers.Dense(1)(Own()(inputs)))

    keras.utils.set_random_seed(0)
    model = make()
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    weights = model.get_weights()
    copied = copy(model)
    assert [v.path for v in copied.variables] == [
        v.path for v in model.variables
    ]
    histories = []
    for each in (model, copied):
        each.compile("adam", "mse")
        histories.append(each.fit(x, y, epochs=2, verbose=0).history["loss"])
    # Dropout, too, draws the same.
    np.testing.assert_allclose(*histories, 1e-6)
    for a, b in zip(model.get_weights(), copied.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    expected = copied.predict(x, verbose=0)
    model.set_weights(weights)
    np.testing.assert_array_equal(copied.predict(x, verbose=0), expected)
    copied.save_weights(tmp_path / "model.weights.h5")
    other = make()
    other.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(other.predict(x, verbose=0), expected)
    kept = []
    for each in (model, copied):
        path = tf.train.Checkpoint(model=each).save(tmp_path / each.name)
        names = [name for name, _ in tf.train.list_variables(path)]
        # An optimizer lists its variables among others' of the same values.
        kept.append([name for name in names if "optimizer" not in name])
    assert kept[0] == kept[1] and len(kept[0]) >= 5
    copied.export(tmp_path / "saved", verbose=False)
    saved = tf.saved_model.load(tmp_path / "saved")
    np.testing.assert_allclose(saved.serve(x), expected, 1e-5)
    assert copied.get_config()["layers"][1]["name"] == model.layers[1].name
