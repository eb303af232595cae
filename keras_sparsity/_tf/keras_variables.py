"""Keras's variables. Checked on Keras 3.5 to 3.15."""

import keras
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


def change_kind(variable, kind):
    """Makes a Keras variable one of a subclass, which casts no values.

    `Variable._autocast`.
    """
    variable.__class__ = kind
    variable._autocast = False


def take_identity(value, other):
    """Has Keras's optimizers know one `tf.Variable` as another.

    `_unique_id`, by which they find variables: `Optimizer._var_key`.

    Args:
        value: the new `tf.Variable`.
        other: the one in whose place it comes.
    """
    value._unique_id = other._unique_id


def at_path(path, value, **options):
    """A variable that has a path, wherever it is made.

    `Variable._path`; in Keras 3.5 `Variable.path`.

    Args:
        path: the path.
        value: its value.
        **options: as for `keras.Variable`.
    """
    made = keras.Variable(value, **options)
    setattr(made, "_path" if hasattr(made, "_path") else "path", path)
    return made


def plain_like(variable, value):
    """A variable of stock Keras with the properties of one of a subclass."""
    made = at_path(
        variable.path,
        value,
        dtype=variable.dtype,
        trainable=variable.trainable,
        name=variable.name,
    )
    made.regularizer = variable.regularizer
    made.constraint = variable.constraint
    return made


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


def take_away(variable, placeholder):
    """Frees a variable's values; assigned ones are dropped from then on.

    As Keras's variables that are not initialized yet: `_value`,
    `_initializer`, `_direct_assign`.

    Args:
        variable: a Keras variable.
        placeholder: function of a shape and `dtype`, called in place of a
            read. Where shapes alone are computed it returns a tensor.
    """
    variable._value = None
    variable._initializer = placeholder
    variable.__dict__["_direct_assign"] = lambda value: None


def give_back(variable, value):
    """Gives a variable that was taken away its values again."""
    del variable.__dict__["_direct_assign"]
    variable._initializer = None
    variable._initialize(value)
