"""Times of steps, over whole cycles of gradient accumulation."""

from keras_sparsity.update import optimizer_arguments


def steps_of(model):
    """The steps of a cycle: of those that together make one update."""
    optimizer = getattr(model, "optimizer", None)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rule = optimizer_arguments.rule_of(inner)
    return getattr(rule, "gradient_accumulation_steps", None) or 1


class Cycles:
    """Adds the times of executions until they have whole cycles of steps.

    One step of a cycle applies an update, and takes longer than the others: no
    single one tells the time of a step. A cycle may begin at any step.

    Args:
        num_steps: of a cycle, see `steps_of`.

    Example:

    >>> cycles = Cycles(num_steps=3)
    >>> [cycles.add(seconds, 1) for seconds in (1.0, 1.0, 4.0)]
    [None, None, (6.0, 3)]
    """

    def __init__(self, num_steps):
        self._num_steps = num_steps
        self._begin()

    def _begin(self):
        self._seconds, self._steps, self._executions = 0.0, 0, 0

    def add(self, seconds, num_steps):
        """Takes the time of an execution of some steps.

        Returns:
            `(seconds, number of steps)` of the cycles that end with it; None
            if they do not.
        """
        self._seconds += seconds
        self._steps += num_steps
        self._executions += 1
        # Shorter executions, of an epoch's end, may leave no common end. So
        # many executions have their share of updates.
        is_many = self._executions >= self._num_steps
        if self._steps % self._num_steps and not is_many:
            return None
        found = self._seconds, self._steps
        self._begin()
        return found
