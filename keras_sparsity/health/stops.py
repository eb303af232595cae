"""All ranks end a `fit` after the same step, also if one alone asks for it.

Ranks may be in different steps, but each is bound to no step beyond the one
that it may have begun: it waits behind that one, from the time when it is asked
until it is told the last step, which is the latest that any rank is bound to.
No rank so waits for one that another rank's wait keeps from ending a step.
"""

import threading

from keras_sparsity.health import errors

# Between two looks for a failure of the ranks.
_LOOK_SECONDS = 0.1


class Stops:
    """The steps of this rank's `fit`s.

    Args:
        send: `Channel.send`, to the rank that decides.
    """

    def __init__(self, send):
        self._send = send
        self._changed = threading.Condition()
        self._fit, self._bound = 0, 1
        self._is_held, self._last = False, None
        # From a `fit` that others have begun before this rank to its last
        # step, None until that is known.
        self._early = {}

    # The main thread.

    def begin(self):
        """Begins a `fit`; all ranks begin the same ones."""
        with self._changed:
            self._fit, self._bound = self._fit + 1, 1
            is_asked = self._fit in self._early
            self._last = self._early.pop(self._fit, None)
            self._is_held = is_asked and self._last is None

    def ends_after(self, step, is_wanted):
        """Whether all ranks end the `fit` behind a step, which has ended here.

        Args:
            step: its number, from 1.
            is_wanted: whether this rank is to end it as soon as possible.
        """
        with self._changed:
            if is_wanted and not self._is_held and self._last is None:
                self._is_held = self._send(kind="stop", fit=self._fit)
            while self._is_held and errors.failure() is None:
                self._changed.wait(_LOOK_SECONDS)
            if self._last is None:
                self._bound = step + 1
                return False
            return step >= self._last

    # The thread that receives messages.

    def hear(self, kind, fit=None, step=None, **others):
        """Takes a message of the rank that decides.

        `hold`: a rank wants to end a `fit`; this one says what it is bound to.
        `last`: the step after which all end it.
        """
        with self._changed:
            if fit is not None and fit > self._fit:
                self._early[fit] = step
                if kind == "hold":
                    self._send(kind="bound", fit=fit, step=1)
                return
            if kind == "hold":
                self._is_held = fit == self._fit and self._last is None
                self._send(kind="bound", fit=fit, step=self._bound)
            if kind == "last" and fit == self._fit:
                self._is_held, self._last = False, step
                self._changed.notify_all()


class LastStep:
    """The last step of a `fit`, found by the rank that decides."""

    def __init__(self):
        self._fit, self._bounds = 0, {}

    def begin(self, fit):
        """Whether no other rank has asked for the end of this `fit` before."""
        is_new = fit > self._fit
        if is_new:
            self._fit, self._bounds = fit, {}
        return is_new

    def found(self, rank, fit, step, ranks):
        """Takes what a rank is bound to.

        Returns:
            The last step, if this was the last one of `ranks`; else None.
        """
        if fit != self._fit:
            return None
        self._bounds[rank] = step
        is_last = self._bounds.keys() >= set(ranks)
        return max(self._bounds.values()) if is_last else None
