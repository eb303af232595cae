"""The shapes of one example of a model's symbolic tensors."""

import math

import tensorflow as tf

# For a size that the model does not know, such as a sequence's length.
UNKNOWN_SIZE = 16


def example_shape(tensor):
    """The shape of one example of a symbolic tensor, its sizes in a list."""
    return [size or UNKNOWN_SIZE for size in tensor.shape[1:]]


def example_bytes(tensor, shape_of=example_shape):
    """The bytes of one example of a symbolic tensor.

    Args:
        shape_of: function of the tensor that gives its shape.
    """
    return math.prod(shape_of(tensor)) * tf.as_dtype(tensor.dtype).size
