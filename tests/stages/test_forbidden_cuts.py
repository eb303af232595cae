"""No cut is where tensors travel that links do not carry as they are."""

import keras
import pytest
import tensorflow as tf

from keras_sparsity.stages.cutting import Cutter


def _ids():
    """Integers, which `Concatenate` says are floats."""
    ids = keras.Input((2,), dtype="int32")
    return ids, keras.layers.Concatenate(name="odd")([ids, ids])


def _flags():
    ids = keras.Input((2,), dtype="int32")
    flags = keras.layers.Lambda(lambda x: x > 0, output_shape=(2,), name="odd")
    return ids, flags(ids)


def _wide():
    numbers = keras.Input((2,))
    wide = keras.layers.Lambda(
        lambda x: x[..., None], output_shape=(2,), name="odd"
    )
    return numbers, wide(numbers)


@pytest.mark.parametrize(
    "make, message",
    [
        (_ids, r"'odd' would travel.*float32, but makes int32"),
        (_flags, r"'odd' would travel.*float32, but makes bool"),
        (_wide, r"shape \(None, 2\), but makes of shape \(None, 2, 1\)"),
    ],
)
def test_tensors_that_are_not_as_layers_say(make, message):
    inputs, odd = make()
    numbers = keras.layers.Lambda(
        lambda x: keras.ops.cast(x, "float32"), name="numbers"
    )(odd)
    flat = keras.layers.Flatten(name="flat")(numbers)
    outputs = keras.layers.Dense(1, name="last")(flat)
    cutter = Cutter(keras.Model(inputs, outputs))
    assert 0 not in cutter.places and cutter.places[-1] == 2
    with pytest.raises(ValueError, match=message):
        cutter.after(["odd"])


class _Spectrum(keras.layers.Layer):
    """Complex numbers of real ones."""

    def call(self, x):
        return tf.signal.fft(tf.cast(x, tf.complex64))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "complex64")


class _Length(keras.layers.Layer):
    """Real numbers of complex ones."""

    def call(self, x):
        return tf.abs(x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "float32")


class _LowerCase(keras.layers.Layer):
    def call(self, x):
        return tf.strings.lower(x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, "string")


def _spectra():
    signals = keras.Input((4,))
    return signals, _Spectrum(name="odd")(signals), _Length(name="real")


def _texts():
    texts = keras.Input((4,), dtype="string")
    ids = keras.layers.StringLookup(vocabulary=["a", "b"], name="real")
    return texts, _LowerCase(name="odd")(texts), ids


@pytest.mark.parametrize(
    "make, dtype", [(_spectra, "complex64"), (_texts, "string")]
)
def test_tensors_that_links_do_not_carry(make, dtype):
    """Gradients of complex numbers would be lost without a word."""
    inputs, odd, layer = make()
    real = keras.ops.cast(layer(odd), "float32")
    outputs = keras.layers.Dense(1, name="last")(real)
    cutter = Cutter(keras.Model(inputs, outputs))
    assert cutter.places == [1, 2]
    message = f"'odd' would travel, which is of the dtype {dtype}.*Cut before"
    with pytest.raises(ValueError, match=message):
        cutter.after(["odd"])


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_others_may_travel(policy):
    ids = keras.Input((None,), dtype="int32")
    kinds = {"dtype": policy}
    x = keras.layers.Embedding(9, 4, mask_zero=True, **kinds)(ids)
    x = keras.layers.LSTM(4, return_sequences=True, **kinds)(x)
    x = keras.layers.MultiHeadAttention(2, 2, **kinds)(x, x)
    x = keras.layers.LayerNormalization(**kinds)(x)
    x = keras.layers.Concatenate(**kinds)([x, x])
    x = keras.layers.GlobalAveragePooling1D(**kinds)(x)
    x = keras.layers.Dropout(0.1, **kinds)(x)
    outputs = keras.layers.Dense(1, dtype="float32")(x)
    cutter = Cutter(keras.Model(ids, outputs))
    assert not cutter.forbidden
