"""Any value for any argument of the public API is taken, or explained."""

import pathlib
import re
import signal

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.public_calls import ANY_VALUE, VALID, parameters, variable


class Unspeakable:
    """Neither its `repr` nor its truth nor its equality is to be had."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __bool__(self):
        raise RuntimeError("no truth")

    def __eq__(self, other):
        raise RuntimeError("no equality")

    __hash__ = object.__hash__


def deep():
    value = []
    for _ in range(20_000):
        value = [value]
    return value


ANYTHING = {
    **{
        repr(value): lambda value=value: value
        for value in (
            *(None, True, False, ..., 0, -1, 3, 2.5, -0.5, 1e300, 1j),
            *(10**30, -(10**30), float("nan"), float("inf"), -float("inf")),
            *("", "text", "\0", b"", b"bytes", b"\xff"),
            *([], [1], [None], ["text"], (), (1, 2), ((),), {}, {"a": 1}),
            *({3: None}, {1, 2}, range(3), slice(None), int, keras.Model),
            *(np.float32(2), np.int64(-3), np.bool_(True), np.str_("text")),
        )
    },
    "long text": lambda: "text" * 10_000,
    "path": lambda: pathlib.Path("text"),
    "deep": deep,
    "function": lambda: len,
    "lambda": lambda: lambda *_, **__: None,
    "module": lambda: np,
    "object": object,
    "generator": lambda: (i for i in range(3)),
    "Unspeakable": Unspeakable,
    "[Unspeakable]": lambda: [Unspeakable()],
    "scalar array": lambda: np.array(3),
    "array": lambda: np.arange(3),
    "matrix": lambda: np.ones((4, 2)),
    "empty array": lambda: np.zeros(0),
    "array of text": lambda: np.array(["text", "more"]),
    "array of objects": lambda: np.array([None, {}], object),
    "dates": lambda: np.array(["2020-01-01"], "datetime64[D]"),
    "scalar tensor": lambda: tf.constant(3),
    "tensor": lambda: tf.constant([1.0, 2.0]),
    "tensor of text": lambda: tf.constant(["text", "more"]),
    "ragged": lambda: tf.ragged.constant([[1], [2, 3]]),
    "sparse": lambda: tf.sparse.from_dense([[0, 1]]),
    "slices": lambda: tf.IndexedSlices(tf.zeros([1, 2]), tf.constant([0])),
    "symbolic": lambda: keras.Input((3,)),
    "variable": variable,
    "tf.Variable": lambda: tf.Variable([1.0, 2.0]),
    "dtype": lambda: tf.int32,
    "dataset": lambda: tf.data.Dataset.range(3),
    "layer": lambda: keras.layers.Dense(1),
    "unbuilt model": lambda: keras.Sequential(),
    "optimizer": lambda: keras.optimizers.SGD(),
    "strategy": tf.distribute.get_strategy,
}
# Of values that are only too many or too large for what is there.
OTHER_ERRORS = {
    "ShardedTable.gather": tf.errors.InvalidArgumentError,  # of an id outside
    "callbacks.ShardedCheckpoint.restore": FileNotFoundError,
}
# Keras's layers and TensorFlow look through all that they are given.
NESTED_TOO_DEEPLY = "depth exceeded (during flattening the tree|in flatten)"
# Whose arguments are tested elsewhere, or have nothing to be tested by.
NOT_FUZZED = {
    "launch.run": "starts processes: tests/launch/test_program.py",
    "collectives.start": "starts an engine: tests/collectives/test_startup.py",
}


class Hang(BaseException):
    pass


def _on_alarm(*_):
    raise Hang


def fault(name, function, arguments, parameter, value):
    """What is wrong with how a value is taken; None if it is all right."""
    signal.setitimer(signal.ITIMER_REAL, 10)
    try:
        function(**{**arguments, parameter: value})
        return None
    except Exception as error:
        told = str(error)
        is_explained = (
            type(error) in (ValueError, TypeError)
            and parameter.rstrip("s") in told.lower()
            and "eceived" in told
            and "ambiguous" not in told
            and len(told) < 5_000
        )
        is_other = isinstance(error, OTHER_ERRORS.get(name, ()))
        if is_explained or is_other or re.search(NESTED_TOO_DEEPLY, told):
            return None
        return f"{type(error).__name__}: {told[:300]}"
    except Hang:
        return "it hangs"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.mark.parametrize("name", [n for n in VALID if n not in NOT_FUZZED])
def test_anything_for_an_argument_is_taken_or_explained(name):
    before = signal.signal(signal.SIGALRM, _on_alarm)
    faults = []
    try:
        function, arguments = VALID[name]()
        for parameter in sorted(parameters(function)):
            if f"{name}.{parameter}" in ANY_VALUE:
                continue
            for label, make in ANYTHING.items():
                found = fault(name, function, arguments, parameter, make())
                if found:
                    faults.append(f"{parameter}={label}: {found}")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not faults, "\n".join(faults)
