"""Routes of rows between ranks: the interface, and straight to the owners."""

import abc
import dataclasses

import tensorflow as tf

from keras_sparsity.collectives.base import Collectives
from keras_sparsity.collectives.engine import Route
from keras_sparsity.exchange.lengths import LengthCarrier


class RowRoute(abc.ABC):
    """How addresses, rows and their gradients travel in one step.

    Attributes, after `ask`:
        arrivals: int32 `(n,)`, of each id of the request the place of its row
            among those that `pull` returns.
        num_sent: number of these rows.
        received: addresses `(m,)` that this rank, as an owner, is asked for;
            or a message in place of addresses, see `told_to_all`.
        parts: `Route` of the messages that arrive at owners.
        is_by_machine: whether `ranks` tells machines apart only.
    """

    is_by_machine = False

    @abc.abstractmethod
    def ask(self, request):
        """Sends owners the addresses of the rows of a `Request`."""

    @abc.abstractmethod
    def pull(self, rows):
        """Sends rows from their owners: `(m, width)` to `(num_sent, width)`."""

    @abc.abstractmethod
    def push(self, gradients):
        """Sends gradients to owners: `(num_sent, width)` to `(m, width)`."""

    @property
    @abc.abstractmethod
    def ranks(self):
        """int32 `(m,)`: the rank that asks for each address, or one of its
        machine."""


class Direct(RowRoute):
    """From each rank to each owner.

    Args:
        exchange: `Exchange`.
    """

    def __init__(self, exchange):
        self._exchange = exchange

    def ask(self, request):
        exchange, size = self._exchange, self._exchange.communicator.size
        dtype = exchange.addresses.dtype
        request.merge()
        sent, positions, splits = tf.cond(
            tf.reduce_all(request.are_inside),
            lambda: by_owner(request),
            lambda: told_to_all(request.outside(), size, dtype, request.rows),
        )
        received, parts = exchange.communicator.all_to_all(
            sent, splits, name=f"{exchange.role}/pull/ids"
        )
        self._sent = sent
        arrivals = tf.gather(positions, request.index)
        self.resume(arrivals, tf.size(sent), received, parts)

    def resume(self, arrivals, num_sent, received, parts):
        """Goes on after an `ask` of an earlier step: its attributes."""
        self.arrivals, self.num_sent = arrivals, num_sent
        self.received, self.parts = received, parts
        self._carrier = Carrier(self._exchange.communicator, parts)

    def pull(self, rows):
        exchange, lengths = self._exchange, self._exchange.lengths
        if lengths is not None:
            # Behind the check of the addresses, as the rows are.
            with tf.control_dependencies([rows]):
                self._carrier = LengthCarrier(
                    exchange.communicator,
                    self.parts,
                    lengths,
                    lengths.pieces(self.parts.receivers, self._sent),
                    lengths.pieces(exchange.communicator.rank, self.received),
                    exchange.role,
                )
        return self._carrier.back(
            rows, f"{exchange.role}/pull/rows", exchange.pull_wire
        )

    def push(self, gradients):
        exchange = self._exchange
        return self._carrier.along(
            gradients, f"{exchange.role}/push/rows", exchange.push_wire
        )

    @property
    def ranks(self):
        return self.parts.senders


@dataclasses.dataclass(frozen=True, eq=False)
class Carrier:
    """Takes rows of one length along a `Route`, and back, by a `Wire`.

    Args:
        communicator: `Collectives` of those who send to each other.
        parts: `Route` of the rows.
    """

    communicator: Collectives
    parts: Route

    def along(self, rows, name, wire):
        send = self.communicator.all_to_all_along
        return wire.carry(rows, send, self.parts, name=name)

    def back(self, rows, name, wire):
        send = self.communicator.all_to_all_back
        return wire.carry(rows, send, self.parts, name=name)


def by_owner(request):
    """A request's addresses by owner: as `sorted_by` returns them."""
    exchange = request.exchange
    owner, address = exchange.addresses.locate(request.rows)
    size = exchange.communicator.size
    return sorted_by(owner, address, size, exchange.addresses.dtype)


def sorted_by(destination, values, size, dtype):
    """Values by destination, the position of each, and the splits."""
    destination = tf.cast(destination, tf.int32)
    order = tf.concat(
        tf.dynamic_partition(tf.range(tf.size(values)), destination, size),
        axis=0,
    )
    return (
        tf.gather(tf.cast(values, dtype), order),
        tf.math.invert_permutation(order),
        tf.math.bincount(destination, minlength=size, maxlength=size),
    )


# Sent in place of addresses: two int64 numbers behind a mark.


def told_to_all(numbers, size, dtype, values):
    """Like `sorted_by`, of a message to all in place of the values."""
    numbers = tf.reshape(tf.bitcast(numbers, dtype), [-1])
    message = tf.concat([tf.constant([dtype.max], dtype), numbers], axis=0)
    return (
        tf.concat([message] * size, axis=0),
        tf.zeros([tf.size(values)], tf.int32),  # of no use
        tf.fill([size], tf.size(message)),
    )


def is_marked(received):
    """Of each element, whether such a message begins with it."""
    return tf.equal(tf.cast(received, tf.int64), received.dtype.max)


def marked(received):
    """The numbers of the first such message, int64 `(2,)`; or zeros."""
    marks = is_marked(received)

    def read():
        start = tf.argmax(tf.cast(marks, tf.int32)) + 1
        width = tf.int64.size // received.dtype.size
        numbers = tf.slice(received, [start], [2 * width])
        shape = [2] if width == 1 else [2, width]
        return tf.bitcast(tf.reshape(numbers, shape), tf.int64)

    return tf.cond(tf.reduce_any(marks), read, lambda: tf.zeros([2], tf.int64))
