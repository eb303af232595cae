"""The steps of an epoch, counted by Keras's executions."""


class EpochSteps:
    """Counts the steps of an epoch.

    Keras calls its callbacks once for an execution of `steps_per_execution`
    steps, of which an epoch's last may have fewer. Where Keras does not know
    the length of an epoch, that one counts as any other. Keras 3.5 calls no
    callback after a shorter one.

    Args:
        callback: the Keras callback that is called; in a loop of the user's
            own it may have no `params`.

    Attributes:
        number: that of the steps of this epoch so far.
    """

    def __init__(self, callback):
        self._callback = callback
        self.number = 0

    def begin(self, number=0):
        """Counts from here: an epoch begins, or goes on after some steps."""
        self.number = number

    def add_execution(self):
        """Counts an execution that has just ended.

        Returns:
            The number of its steps.
        """
        count = self._callback.model.steps_per_execution
        in_epoch = (self._callback.params or {}).get("steps")
        if in_epoch and self.number < in_epoch:
            count = min(count, in_epoch - self.number)
        self.number += count
        return count
