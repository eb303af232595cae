"""Schedules of a pipeline: each stage's tasks, in their order.

A schedule is data, so that it can be simulated before anything runs.
"""

import dataclasses
import enum
import typing

from keras_sparsity.stages.turns import Turns


class Kind(enum.Enum):
    """The kind of a task."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Task(typing.NamedTuple):
    """A unit of a stage's work.

    Attributes:
        kind: `Kind`.
        batch: the number of the micro-batch or mini-batch it is about. An
            update of several has the last one's. A range of numbers, if the
            pass computes several micro-batches as one.
    """

    kind: Kind
    batch: int | range


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The tasks of all stages.

    Attributes:
        num_batches: the number of micro-batches or mini-batches.
        stages: for each stage, from the first, a tuple of its `Task`s in the
            order in which it runs them.
        num_pieces: the number of pieces of each batch, if the ranks of a stage
            share it; else 1.
        delays: the times in which activations and gradients travel, where a
            pass takes 1; they do not wait for each other.
    """

    num_batches: int
    stages: tuple
    num_pieces: int = 1
    delays: tuple = (0, 0)

    @property
    def num_stages(self):
        return len(self.stages)

    def in_flight(self, stage):
        """The largest number of batches that a stage holds activations of."""
        held = most = 0
        for task in self.stages[stage]:
            held += task.kind is Kind.FORWARD
            most = max(most, held)
            held -= task.kind is Kind.BACKWARD
        return most

    def of_replica(self, replica, num_replicas):
        """This schedule for one of several parts of a mini-batch.

        Args:
            replica: the number of the replica, from 0.
            num_replicas: the number of replicas, each of which runs this
                schedule on as many micro-batches of its own.

        Returns:
            `Schedule` of the micro-batches of all; its tasks are those of the
            replica.

        Example:

        >>> [task.batch for task in gpipe(1, 2).of_replica(1, 2).stages[0]]
        [2, 3, 2, 3, 3]
        """
        first = replica * self.num_batches
        stages = [
            tuple(task._replace(batch=first + task.batch) for task in tasks)
            for tasks in self.stages
        ]
        return Schedule(num_replicas * self.num_batches, tuple(stages))

    def of_pieces(self, own, num_pieces):
        """This schedule for a rank that shares each batch with others.

        Args:
            own: the range of the rank's pieces of a batch.
            num_pieces: the number of pieces of a batch.

        Returns:
            `Schedule` of as many batches; the batch of a task is the range of
            the rank's pieces among those of all batches.

        Example:

        >>> shared = gpipe(1, 2).of_pieces(range(1, 2), num_pieces=2)
        >>> [task.batch for task in shared.stages[0]][:2]
        [range(1, 2), range(3, 4)]
        """

        def shared(task):
            first = task.batch * num_pieces
            return task._replace(
                batch=range(first + own.start, first + own.stop)
            )

        stages = tuple(tuple(map(shared, tasks)) for tasks in self.stages)
        return Schedule(self.num_batches, stages, num_pieces)


def gpipe(num_stages, num_batches):
    """All forward passes, all backward passes, one update.

    Args:
        num_stages: N.
        num_batches: M, the micro-batches of a mini-batch.

    Returns:
        `Schedule`. Every stage holds the activations of M micro-batches.

    Example:

    >>> [task.kind.value for task in gpipe(2, 2).stages[0]]
    ['forward', 'forward', 'backward', 'backward', 'update']

    References:
        GPipe (arXiv:1811.06965), 2.3.
    """
    batches = range(num_batches)
    tasks = (
        *(Task(Kind.FORWARD, batch) for batch in batches),
        *(Task(Kind.BACKWARD, batch) for batch in batches),
        Task(Kind.UPDATE, num_batches - 1),
    )
    return Schedule(num_batches, (tasks,) * num_stages)


def one_forward_one_backward(num_stages, num_batches):
    """One forward and one backward pass in turn, one update at the end.

    The same result as `gpipe`: the same gradients, added in the same order.

    Args:
        num_stages: N.
        num_batches: M, the micro-batches of a mini-batch.

    Returns:
        `Schedule`. Stage k, from 0, holds the activations of at most N - k
        micro-batches.

    Example:

    >>> one_forward_one_backward(4, 8).in_flight(1)
    3

    References:
        PipeDream (arXiv:1806.03377), 3.2; its flush: arXiv:2006.09503.
    """
    last = Task(Kind.UPDATE, num_batches - 1)
    return Schedule(
        num_batches,
        tuple(
            (*_in_turn(num_stages - 1 - stage, num_batches), last)
            for stage in range(num_stages)
        ),
    )


FLUSHED = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def without_flush(num_stages, num_batches, messages_ahead=False):
    """One forward and one backward pass in turn, an update after each.

    The batches are whole mini-batches. A forward pass at stage k misses the
    updates of up to N - 1 - k mini-batches before its own; with
    `messages_ahead`, of up to 4 (N - 1 - k).

    Args:
        num_stages: N.
        num_batches: mini-batches until the pipeline drains.
        messages_ahead: whether messages travel during a turn of their own,
            see `Turns`.

    Returns:
        `Schedule`.

    Example:

    >>> [task.kind.value for task in without_flush(2, 2).stages[1]]
    ['forward', 'backward', 'update', 'forward', 'backward', 'update']
    >>> without_flush(2, 9, messages_ahead=True).in_flight(0)
    5

    References:
        SpecTrain (arXiv:1809.02839), 3; PipeDream (arXiv:1806.03377), 3.2.
    """
    turns = Turns(num_stages, messages_ahead)
    stages = []
    for stage in range(num_stages):
        tasks = []
        for task in _in_turn(turns.num_ahead(stage), num_batches):
            tasks.append(task)
            if task.kind is Kind.BACKWARD:
                tasks.append(Task(Kind.UPDATE, task.batch))
        stages.append(tuple(tasks))
    # Of turns of two passes: activations wait from the middle of one for the
    # begin of the second one after, gradients from the end of one for the
    # middle of the second one after.
    delays = (3, 3) if messages_ahead else (0, 0)
    return Schedule(num_batches, tuple(stages), delays=delays)


def _in_turn(num_ahead, num_batches):
    """Passes of a stage whose forward passes are `num_ahead` batches ahead."""
    for turn in range(num_batches + num_ahead):
        if turn < num_batches:
            yield Task(Kind.FORWARD, turn)
        if turn >= num_ahead:
            yield Task(Kind.BACKWARD, turn - num_ahead)
