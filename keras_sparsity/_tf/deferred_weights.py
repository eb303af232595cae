"""Weights of layers that get their first values later than they are made.

As Keras's own of a `keras.StatelessScope`: `_value` is None, and a read
computes the first value by `_initializer`. Checked on Keras 3.5 to 3.15.
"""

import contextlib
import inspect

import keras
import tensorflow as tf

from keras_sparsity._tf import contexts, keras_scopes, patches

# Of the entered contexts: lists of deferred weights, and whether their first
# values take messages.
_entered = []


@contextlib.contextmanager
def deferring():
    """While entered, layers and tables make weights without values.

    These get their first values, the same as without, by `initialize`, when
    something is assigned to them, or at the end. Weights whose initializer
    may give other values later than now get them at once. After an exception,
    which other ranks may not have, those that send messages get none.
    """

    def make(stock):
        signature = inspect.signature(stock)

        def add_weight(layer, *args, **kwargs):
            bound = signature.bind(layer, *args, **kwargs).arguments
            return made(
                lambda: stock(layer, *args, **kwargs), bound.get("initializer")
            )

        return add_weight

    _entered.append([])
    try:
        with patches.ADD_WEIGHT.by(make):
            yield
    except BaseException:
        initialize(v for v, sends in _entered.pop() if not sends)
        raise
    initialize(v for v, _ in _entered.pop())


def at_once():
    """While entered, weights that layers make in a trace get values in it.

    TensorFlow gives them values when the function has been traced: too late for
    the messages, sent meanwhile, by which all ranks get the same ones.
    """

    def make(stock):
        def add_weight(*args, **kwargs):
            with tf.init_scope():
                return stock(*args, **kwargs)

        return add_weight

    return patches.ADD_WEIGHT.by(make)


def made(make, initializer, sends_messages=False):
    """A weight, which has no value yet where `deferring` is entered.

    Args:
        make: function without arguments that makes it.
        initializer: that of its first value.
        sends_messages: whether that takes part in messages of all ranks.
    """
    is_now = not _entered or not _repeats(initializer)
    if is_now or keras_scopes.is_tracing_shapes():
        return make()
    with keras.StatelessScope(initialize_variables=False):
        variable = make()
    _forget(variable)
    _defer(variable, variable._initializer)
    _entered[-1].append((variable, sends_messages))
    return variable


def initialize(variables):
    """Gives those of some variables that were deferred their first values."""
    for variable in variables:
        if _is_deferred(variable):
            was_trainable = variable.__dict__.pop("_direct_assign").is_trainable
            # As it was made: a tape watches no `tf.Variable` that was frozen
            # then, though its layer may be trained later.
            with contexts.attribute(variable, "trainable", was_trainable):
                variable._deferred_initialize()


class _InitializeFirst:
    """In place of a deferred variable's `_direct_assign`.

    Attributes:
        is_trainable: whether the variable was trainable when it was made.
    """

    def __init__(self, variable):
        self._variable, self.is_trainable = variable, variable.trainable

    def __call__(self, value):
        initialize([self._variable])
        self._variable._direct_assign(value)


def _defer(variable, initializer):
    variable._value, variable._initializer = None, initializer
    variable.__dict__["_direct_assign"] = _InitializeFirst(variable)


def _is_deferred(variable):
    assign = vars(variable).get("_direct_assign")
    return isinstance(assign, _InitializeFirst)


def _repeats(initializer):
    """Whether an argument of `add_weight` gives the same values each time."""
    if initializer is None or isinstance(initializer, str):
        return True  # Keras makes one, with a seed of its own
    kind = type(initializer)
    is_built_in = kind is getattr(keras.initializers, kind.__name__, None)
    return is_built_in and isinstance(getattr(initializer, "seed", 0), int)


def _forget(variable):
    """Keeps Keras from initializing a variable with all others."""
    from keras.src.backend.common import global_state

    waiting = global_state.get_global_attribute("uninitialized_variables", [])
    # By identity: comparing variables compares their values.
    waiting[:] = [each for each in waiting if each is not variable]
