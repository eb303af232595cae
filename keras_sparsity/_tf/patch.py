"""A global name of Keras or TensorFlow that is replaced for a while."""

import contextlib
import functools
import pkgutil
import threading

import keras

_staying = contextlib.ExitStack()  # contexts of `stay`


class Patch:
    """A function or method of Keras or TensorFlow that can be replaced.

    Args:
        owner: the class or module that has it, a name for
            `pkgutil.resolve_name`.
        name: its name there.
        during: the extent of the replacement.
        reason: why no narrower replacement does.
        spares_bases: whether classes from which the owner inherits it keep
            theirs.
    """

    def __init__(self, owner, name, during, reason, spares_bases=False):
        self._owner, self.name = owner, name
        self.during, self.reason = during, reason
        self._spares_bases = spares_bases

    def __repr__(self):
        return f"{self._owner}.{self.name}".replace(":", ".")

    @property
    def owner(self):
        found = pkgutil.resolve_name(self._owner)
        if found is not keras.Model or self._spares_bases:
            return found
        # Keras takes a method of the model's for an overridden one.
        return next(kind for kind in found.__mro__ if self.name in vars(kind))

    @property
    def is_in_place(self):
        found = getattr(self.owner, self.name, None)  # not in every Keras
        return getattr(found, "_patch", None) is self

    def stay(self, make):
        """As `by`, for the rest of the process; once."""
        if not self.is_in_place:
            _staying.enter_context(self._in_place(make))

    def by(self, make):
        """While entered, `make(stock)` stands in place of the function.

        In this thread: others may make the input of the steps meanwhile.
        """

        def make_for_thread(stock):
            replacement, own = make(stock), threading.get_ident()

            def call(*args, **kwargs):
                is_other = threading.get_ident() != own
                return (stock if is_other else replacement)(*args, **kwargs)

            return call

        return self._in_place(make_for_thread)

    @contextlib.contextmanager
    def _in_place(self, make):
        owner = self.owner
        stock, is_own = getattr(owner, self.name), self.name in vars(owner)
        replacement = functools.wraps(stock)(make(stock))
        replacement._patch = self
        setattr(owner, self.name, replacement)
        try:
            yield
        finally:
            if is_own:
                setattr(owner, self.name, stock)
            else:
                delattr(owner, self.name)
