"""Tensors of one dtype travel in one message."""

import numpy as np
import tensorflow as tf

from keras_sparsity.collectives.fusion import fused
from keras_sparsity.collectives.wire import Wire


def test_one_message_per_dtype():
    tensors = [
        tf.constant([[1.0, 2.0]]),
        tf.constant(3),
        tf.zeros([0], tf.float32),
        tf.constant([4, 5]),
        tf.constant(6.0),
    ]
    messages = []

    def send(message, parts):
        messages.append((message.dtype.name, len(message), len(parts)))
        return message * 2

    wires = [Wire(tensor.dtype, tensor.dtype) for tensor in tensors]
    received = fused(tensors, wires, send)
    assert messages == [("float32", 3, 3), ("int32", 3, 2)]
    for sent, value in zip(tensors, received, strict=True):
        assert value.dtype == sent.dtype
        np.testing.assert_array_equal(value, 2 * sent.numpy())


def test_unknown_shapes():
    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([3])])
    def traced(one, other):
        wire = Wire(tf.float32, tf.float32)
        values = fused([one, other], [wire] * 2, lambda message, _: message)
        assert [value.shape.as_list() for value in values] == [[None, 2], [3]]
        return values

    one, other = traced(tf.ones([4, 2]), tf.constant([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(one, np.ones([4, 2]))
    np.testing.assert_array_equal(other, [1, 2, 3])
