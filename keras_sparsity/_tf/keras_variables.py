"""Keras's variables. Checked on Keras 3.5 to 3.15."""

import tensorflow as tf

# `tf.train.Checkpoint` and `model.export` call these methods of a variable.
SAVING_METHODS = (
    "_serialize_to_tensors",
    "_restore_from_tensors",
    "_export_to_saved_model_graph",
)


def is_variable(value):
    """Whether a value is a Keras variable.

    `keras.src.backend.Variable`: the variables that Keras 3.5 itself makes
    are not of the class `keras.Variable`.
    """
    from keras.src import backend

    return isinstance(value, backend.Variable)


def variable_like(variable):
    """Another `tf.Variable` with the same value and properties."""
    return tf.Variable(
        variable,
        trainable=variable.trainable,
        dtype=variable.dtype,
        name=variable.name.partition(":")[0],
        synchronization=variable.synchronization,
        aggregation=variable.aggregation,
    )


def variable_state(variable):
    """The attributes of a copy of a Keras variable (`Variable._value`)."""
    state = dict(vars(variable))
    if state["_value"] is not None:
        state["_value"] = variable_like(state["_value"])
    return state
