"""The interface of an engine, and the route of exchanged rows."""

import abc
import dataclasses

import tensorflow as tf


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
    """Row counts of an `all_to_all`, with which more rows can follow it.

    Args:
        splits: int32 `(size,)`, the rows sent to each rank.
        received_splits: int32 `(size,)`, the rows received from each rank.
        largest: int32 scalar, a bound on the rows that any rank sends to any
            other, the same on all ranks, for engines that pad; 0 for others.

    Raises:
        ValueError: By `Collectives`, if rows and splits do not fit.

    Example:

    >>> route = Route(tf.constant([2, 1]), tf.constant([0, 3]), 3)
    >>> route.senders.numpy(), route.receivers.numpy()
    (array([1, 1, 1], dtype=int32), array([0, 0, 1], dtype=int32))

    References:
        EuroSys 3.1 (pull and push follow one route).
    """

    splits: tf.Tensor
    received_splits: tf.Tensor
    largest: tf.Tensor

    def reversed(self):
        """The route back."""
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

    `tf.repeat` does the same for any shape, in 50 operations.
    """
    return num_up_to(tf.cumsum(counts), tf.range(tf.reduce_sum(counts)))


def num_up_to(numbers, values):
    """int32: for each value, how many of the sorted numbers are at most it.

    Both have one dimension. `tf.searchsorted` (side "right") does the same for
    any shape, in 30 operations.
    """
    found = tf.raw_ops.UpperBound(
        sorted_inputs=tf.expand_dims(numbers, 0),
        values=tf.expand_dims(values, 0),
    )
    return tf.reshape(found, [-1])


class Engine(abc.ABC):
    """The raw operations of one engine among the processes of one group.

    Tensors have the dtype of a `reduce_wire` or `move_wire`. Names are the
    same on all ranks and different for each call in flight. `Collectives`
    adds checks and gradients, `Calls` names, fusion and the journal.

    Beside its class, an engine's module has two functions for `startup`:
    `bring_up()`, which returns `(engine of all processes, name of this
    process's machine)`, and `others()`, a dict from the other processes' names
    to addresses as `arrival.unreachable` takes them.

    Attributes:
        name: The engine's name in `settings.ENGINES`.
        pads: Whether every part of an exchange is padded to `Route.largest`.
        reduces_means: Whether `all_reduce` takes the op "mean", too. Else means
            are sums divided by `size`.
        rank, size: This process in the group.
    """

    name: str
    pads = reduces_means = False
    rank: int
    size: int

    @abc.abstractmethod
    def reduce_wire(self, dtype):
        """The `Wire` that reduces `dtype`."""

    @abc.abstractmethod
    def move_wire(self, dtype):
        """The `Wire` that moves `dtype`."""

    @abc.abstractmethod
    def all_reduce(self, flat, op, name):
        """Reduces `flat`, `(n,)`, by `op`: "sum", "max" or "min"."""

    @abc.abstractmethod
    def all_to_all(self, rows, splits, name):
        """Sends `splits[r]` rows to each rank r; `(received, Route)`."""

    @abc.abstractmethod
    def all_to_all_along(self, rows, route, name):
        """Sends rows along a known route and returns the received rows."""

    @abc.abstractmethod
    def all_gather(self, rows, name, counts=None):
        """The rows of all ranks, whose numbers may differ.

        Args:
            counts: int32 `(size,)`: those numbers, None if they are unknown.
        """

    @abc.abstractmethod
    def broadcast(self, flat, root, name):
        """Root's `flat`, `(n,)`."""

    @abc.abstractmethod
    def split(self, groups, label):
        """The engine among one group's processes.

        Args:
            groups: Disjoint lists that cover all ranks, the same on all
                ranks. Called once per label, by all ranks, eagerly.
            label: The group's name, the same on all ranks.
        """

    def end_groups(self):  # noqa: B027  # most have nothing to end
        """Ends all groups of `split` whose end would end others' processes.

        All ranks call it, eagerly, before one may be lost.
        """

    @abc.abstractmethod
    def abort(self, message):
        """Makes blocked operations fail. Called from any thread."""

    @abc.abstractmethod
    def close(self):
        """Ends the engine at exit, after all ranks agreed to."""
