"""The versions of weights that a schedule's passes compute with."""

from keras_sparsity.stages.schedule import Kind, Task
from keras_sparsity.stages.simulation import simulate


def missed_updates(schedule, stage):
    """For each pass, the updates of earlier batches that it comes before.

    Sequential training would have made them. They are the distance s of the
    `"sequential"` prediction.

    Args:
        schedule: `Schedule`.
        stage: the stage's number k, from 0.

    Returns:
        Dict from `Task` to an integer. Without a flush, in the steady state:
        N - 1 - k for a forward pass and 0 for a backward pass; with
        `messages_ahead` 4 (N - 1 - k) and 0.

    Example:

    >>> from keras_sparsity.stages.schedule import Kind, Task, without_flush
    >>> missed = missed_updates(without_flush(4, 10), 1)
    >>> missed[Task(Kind.FORWARD, 5)], missed[Task(Kind.BACKWARD, 5)]
    (2, 0)

    References:
        SpecTrain (arXiv:1809.02839), 3.
    """
    return _counted(schedule, stage, lambda task, batch: batch < task.batch)


def updates_to_return(schedule, stage):
    """For each pass, the updates until its batch is back at the first stage.

    They are the distance s of the `"paper"` prediction: SpecTrain computes
    with the weights that a stage will have when the batch's round trip ends.
    The batch's own update does not count.

    Args:
        schedule: `Schedule`.
        stage: the stage's number k, from 0.

    Returns:
        Dict from `Task` to an integer. Without a flush, in the steady state:
        floor(k / 2) + N - k - 1 for a forward pass and floor(k / 2) for a
        backward pass; with `messages_ahead` 2 k + 4 (N - k - 1) and 2 k.

    Raises:
        ValueError: if the schedule deadlocks.

    Example:

    >>> from keras_sparsity.stages.schedule import Kind, Task, without_flush
    >>> ahead = updates_to_return(without_flush(4, 10), 2)
    >>> ahead[Task(Kind.FORWARD, 5)], ahead[Task(Kind.BACKWARD, 5)]
    (2, 1)

    References:
        SpecTrain (arXiv:1809.02839), equations 5 and 6.
    """
    starts = simulate(schedule).starts

    def counts(task, batch):
        # Updates take no time: they end with their backward pass. The round
        # trip ends with that of the first stage, in the same unit of time.
        end = starts[stage][Task(Kind.BACKWARD, batch)]
        returned = starts[0][Task(Kind.BACKWARD, task.batch)]
        return batch != task.batch and end <= returned

    return _counted(schedule, stage, counts)


def _counted(schedule, stage, counts):
    """For each pass, the later updates for which `counts(task, batch)`."""
    tasks = schedule.stages[stage]
    later, found = [], {}
    for task in reversed(tasks):
        if task.kind is Kind.UPDATE:
            later.append(task.batch)
        else:
            found[task] = sum(counts(task, batch) for batch in later)
    return found
