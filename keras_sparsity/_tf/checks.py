"""Checks of arguments, with errors that name the expected value."""

import os

import numpy as np

_MOST_CHARACTERS = 400
_MOST_INTEGER = 2**63 - 1  # int64's
_MOST_PARTITIONS = 1_000_000


def spell(value):
    """A value for a message: its `repr`, where it has a short one."""
    try:
        return shortened(repr(value))
    except Exception as error:  # whatever an object's own method raises
        return f"<its repr fails with {type(error).__name__}>"


def shortened(text):
    text = str(text)
    if len(text) > _MOST_CHARACTERS:
        text = f"{text[:_MOST_CHARACTERS]}..."
    return text


def check(is_valid, name, value, expected):
    """Raises unless an argument is valid.

    Args:
        is_valid: whether it is.
        name: the argument's name.
        value: the received one.
        expected: text that follows "must be".
    """
    if not is_valid:
        raise ValueError(
            f"`{name}` must be {expected}. Received: {name}={spell(value)} "
            f"(of type {type(value).__name__})."
        )


def is_integer(value):
    """Whether it is an integer of Python or NumPy, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def is_number(value):
    """Whether it is a real number of Python or NumPy, and no bool."""
    return is_integer(value) or isinstance(value, (float, np.floating))


def positive_integer(name, value, otherwise="", most=None):
    """The argument as an `int`; `otherwise` names the alternative."""
    limit = "" if most is None else f", at most {most:,}"
    check(
        is_integer(value) and 1 <= value <= (most or np.inf),
        name,
        value,
        f"a positive integer{otherwise}{limit}",
    )
    return int(value)


def dimension(name, value):
    """The argument as an `int` that a tensor's shape can have."""
    return positive_integer(name, value, most=_MOST_INTEGER)


def num_partitions(name, value, otherwise=""):
    """A number of partitions of a table, each of which is a variable."""
    return positive_integer(name, value, otherwise, _MOST_PARTITIONS)


def positive_number(name, value, otherwise=""):
    """Checks for a finite number above 0."""
    check(
        is_number(value) and 0 < value < np.inf,
        name,
        value,
        f"a positive number{otherwise}",
    )


def one_of(name, value, choices, otherwise=""):
    """Checks for one of some strings."""
    known = f"one of {', '.join(map(repr, choices))}"
    if len(choices) == 2:
        known = " or ".join(map(repr, choices))
    # Not by `==` alone: arrays and tensors compare element by element.
    is_known = isinstance(value, str) and value in choices
    check(is_known, name, value, f"{known}{otherwise}")


def function(name, value, expected):
    """Checks for None or a function."""
    check(value is None or callable(value), name, value, expected)


def boolean(name, value):
    check(isinstance(value, (bool, np.bool_)), name, value, "True or False")


def string(name, value):
    check(isinstance(value, str), name, value, "a string")


def optional_string(name, value):
    is_valid = value is None or isinstance(value, str)
    check(is_valid, name, value, "None or a string")


def path(name, value, expected):
    """Checks for a path, as a string or an `os.PathLike` of one."""
    is_path = isinstance(value, (str, os.PathLike))
    is_valid = is_path and isinstance(os.fspath(value), str)
    # None of the system's calls takes the others.
    is_valid = is_valid and os.fspath(value) and "\0" not in os.fspath(value)
    check(is_valid, name, value, expected)


def processes(name, value):
    """Checks for `Collectives`, or their stand-in in a test."""
    check(
        hasattr(value, "rank") and hasattr(value, "size"),
        name,
        value,
        "the `ks.collectives.Collectives` of the processes, such as "
        "`strategy.collectives` or `ks.collectives.current()`",
    )


def tensor(name, value, expected):
    """The argument as a tensor."""
    import tensorflow as tf  # The launcher checks arguments without it.

    try:
        return tf.convert_to_tensor(value)
    except Exception as error:  # whatever an object's own method raises
        raise ValueError(
            f"`{name}` must be {expected}. Received: {name}={spell(value)} "
            f"(of type {type(value).__name__}), of which TensorFlow makes no "
            f"tensor: {shortened(error)}"
        ) from error


def keras_object(name, value, get, expected):
    """The Keras object of a name, a configuration or an object.

    Args:
        name: the argument's name.
        value: the received one.
        get: Keras's function, such as `keras.optimizers.get`.
        expected: text that follows "must be".
    """
    try:
        found = get(value)
        if not (found is None or callable(found) or hasattr(found, "apply")):
            raise ValueError(f"{type(found).__name__} is no such object.")
        return found
    except Exception as error:  # whatever an object's own method raises
        raise ValueError(
            f"`{name}` must be {expected}. Received: {name}={spell(value)} "
            f"(of type {type(value).__name__}). Keras says: {shortened(error)}"
        ) from error
