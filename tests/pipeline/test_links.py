"""Messages between stages."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.pipeline.links import Crossing


def test_a_mask_that_a_layer_has_taken_away_masks_nothing():
    ids = keras.Input((3,), dtype="int32")
    layer = keras.layers.Embedding(5, 4, mask_zero=True)
    crossing = Crossing((layer(ids),))
    value = layer(tf.constant([[1, 2, 0]]))
    _, mask = crossing.with_masks([value])
    np.testing.assert_array_equal(mask, [[True, True, False]])
    keras.layers.MultiHeadAttention(1, 2)(value, value)
    _, mask = crossing.with_masks([value])
    np.testing.assert_array_equal(mask, [[True, True, True]])


def test_outputs_of_another_dtype_than_their_layer_says_are_refused():
    """Where ranks would wait for the other dtype."""

    class FirstOfTwo:
        rank, size = 0, 2

    layer = keras.layers.Lambda(lambda x: x > 0, output_shape=(3,))
    crossing = Crossing((layer(keras.Input((3,))),))
    with pytest.raises(ValueError, match="Received: .* of bool; expected: fl"):
        crossing.broadcast(FirstOfTwo(), [layer(tf.ones([1, 3]))], None, 0)
