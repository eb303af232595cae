"""Messages between stages."""

import keras
import numpy as np
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
