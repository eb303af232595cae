"""Times in which a process did not run, as while its job is suspended."""

import time

# Python's lock may be held for a second or two (imports).
_LEAST_SECONDS = 3.0


class Pauses:
    """Finds the pauses of a thread that looks several times a second.

    While its process is stopped it hears of nobody, which says nothing about
    others: all may have been stopped together.
    """

    def __init__(self):
        self._looked = time.monotonic()

    def passed(self):
        """The seconds of a pause since the last look; 0 without one."""
        before, self._looked = self._looked, time.monotonic()
        seconds = self._looked - before
        return seconds if seconds > _LEAST_SECONDS else 0.0
