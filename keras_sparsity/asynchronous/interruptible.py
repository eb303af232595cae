"""Calls that wait without holding the main thread."""

import threading
from concurrent import futures


class Interruptible:
    """A call that waits, in a thread: signal handlers run meanwhile.

    Python runs them in the main thread alone, between its own operations: not
    while that is in a call of TensorFlow. A call that a handler's exception has
    interrupted goes on, and the next one takes its result.

    Args:
        call: function without arguments.
    """

    def __init__(self, call):
        self._call, self._found = call, None

    def __call__(self):
        if self._found is None:
            self._found = futures.Future()
            threading.Thread(
                target=self._run, args=(self._found,), daemon=True
            ).start()
        futures.wait([self._found])
        found, self._found = self._found, None
        return found.result()

    def _run(self, found):
        try:
            found.set_result(self._call())
        except BaseException as error:
            found.set_exception(error)
