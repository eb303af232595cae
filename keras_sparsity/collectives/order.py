"""Calls of a traced function that wait for others."""

import tensorflow as tf

_HELD = "keras_sparsity/sums wait for"


def hold_sums(tensors):
    """Has each `all_reduce` that is traced from now on wait for these.

    In the function that is being traced, and those within it.

    Args:
        tensors: list of tensors of that function.
    """
    if not tf.executing_eagerly():
        for tensor in tensors:
            tf.compat.v1.add_to_collection(_HELD, tensor)


def held_sums():
    """What an `all_reduce` waits for, for `tf.control_dependencies`."""
    if tf.executing_eagerly():
        return []
    # A function has its outer ones' collections, as they were.
    return tf.compat.v1.get_collection(_HELD)
