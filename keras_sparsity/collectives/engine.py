"""What an engine must do, and what stands between it and its callers."""

import abc
import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
    """The way an all_to_all went, so that other tensors need not ask again.

    Attributes:
        splits: int32 `(size,)`, the rows sent to each rank.
        received_splits: int32 `(size,)`, the rows received from each rank.
        largest: int32 scalar, a bound on the rows any rank sends any other,
            the same on all ranks, for engines that pad; 0 for others.
    """

    splits: tf.Tensor
    received_splits: tf.Tensor
    largest: tf.Tensor

    def reversed(self):
        """The way back."""
        return Route(self.received_splits, self.splits, self.largest)

    @property
    def senders(self):
        """int32 `(sum(received_splits),)`, the rank each row comes from."""
        return repeated(self.received_splits)

    @property
    def receivers(self):
        """int32 `(sum(splits),)`, the rank each row goes to."""
        return self.reversed().senders


def repeated(counts):
    """`counts[0]` times 0, `counts[1]` times 1 and so on, as int32.

    As `tf.repeat`, which takes any shape and is 50 operations.
    """
    return num_up_to(tf.cumsum(counts), tf.range(tf.reduce_sum(counts)))


def num_up_to(numbers, values):
    """int32, for each of `values`, how many of the `numbers` are at most it.

    As `tf.searchsorted` on the right, which takes any shape and is 30
    operations. The numbers are sorted, both have one dimension.
    """
    found = tf.raw_ops.UpperBound(
        sorted_inputs=tf.expand_dims(numbers, 0),
        values=tf.expand_dims(values, 0),
    )
    return tf.reshape(found, [-1])


class Engine(abc.ABC):
    """The raw operations of one engine among the processes of one group.

    Tensors come in a dtype that `reduce_wire` or `move_wire` gave, and names
    are the same on all ranks, different for each call in flight. Naming,
    checks, fusion and gradients are `Collectives`' part.

    Attributes:
        name: The engine's name, as `start` takes it.
        pads: Whether it sends each rank as much as any gets of any other, a
            `Route.largest`.
        rank, size: This process in the group.
    """

    name: str
    pads = False
    rank: int
    size: int

    @abc.abstractmethod
    def reduce_wire(self, dtype):
        """The `Wire` in which `dtype` is reduced."""

    @abc.abstractmethod
    def move_wire(self, dtype):
        """The `Wire` in which `dtype` is moved."""

    @abc.abstractmethod
    def all_reduce(self, flat, op, name):
        """Reduces `flat` `(n,)` by `op`, one of sum, max and min."""

    @abc.abstractmethod
    def all_to_all(self, rows, splits, name):
        """Sends `splits[r]` rows to each rank r: `(received, Route)`."""

    @abc.abstractmethod
    def all_to_all_along(self, rows, route, name):
        """Sends rows along a known route and returns the received rows."""

    @abc.abstractmethod
    def all_gather(self, rows, name):
        """The rows of all ranks, which may be of different numbers."""

    @abc.abstractmethod
    def broadcast(self, flat, root, name):
        """Root's `flat` `(n,)`."""

    @abc.abstractmethod
    def split(self, groups, label):
        """The engine among one group's processes.

        Args:
            groups: Disjoint lists of ranks that cover all ranks, the same on
                every rank. Called once per label, by all ranks, eagerly.
            label: The group's name, the same on every rank.
        """

    @abc.abstractmethod
    def abort(self, message):
        """Ends blocked operations with an error. Called from any thread."""

    @abc.abstractmethod
    def close(self):
        """Leaves, after all ranks agreed to. Called once, at exit."""


class NoJournal:
    """Keeps nothing: one process cannot disagree with itself.

    The interface is that of `journal.Journal`.
    """

    def site(self, op, name, dtype="", shape=None, ranks=None, dynamic=False):
        """The place in the program where a collective is called."""
        return None

    def run(self, site, tensors, collective):
        """Runs `collective()`, whose inputs are `tensors`."""
        return collective()
