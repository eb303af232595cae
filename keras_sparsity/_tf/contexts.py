"""Contexts in which a value holds, until they are left."""

import contextlib


@contextlib.contextmanager
def on_top(stack, value):
    """While entered, a value is the last one of a list; yields it."""
    stack.append(value)
    try:
        yield value
    finally:
        stack.pop()


@contextlib.contextmanager
def attribute(owner, name, value):
    """While entered, an attribute of an object has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def own_attributes(owner, **values):
    """While entered, an object has these attributes of its own.

    In place of its class's methods or of earlier ones. Not through Keras's
    attribute tracking: they are no state.
    """
    before = {n: vars(owner)[n] for n in values if n in vars(owner)}
    for name, value in values.items():
        object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                object.__setattr__(owner, name, before[name])
            else:
                object.__delattr__(owner, name)
