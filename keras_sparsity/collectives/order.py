"""Order between a traced function's messages."""

import tensorflow as tf

_HELD = "keras_sparsity/sums wait for"


def hold_sums(tensors):
    """Each `all_reduce` that is traced from now on waits for `tensors`.

    Args:
        tensors: List of tensors of the function being traced; the rule holds
            in it and in functions within it.
    """
    if not tf.executing_eagerly():
        for tensor in tensors:
            tf.compat.v1.add_to_collection(_HELD, tensor)


def held_sums():
    """The tensors of `hold_sums`, for `tf.control_dependencies`."""
    if tf.executing_eagerly():
        return []
    # A function starts with a copy of its outer function's collections.
    return tf.compat.v1.get_collection(_HELD)
