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
