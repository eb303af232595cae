"""No cut is where tensors travel that are not as their layers say."""

import keras
import pytest

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
