"""Rows of several lengths, which travel without padding."""

import math

import numpy as np
import tensorflow as tf

from keras_sparsity.collectives.engine import Route, num_up_to


class Lengths:
    """How long the rows of tables are that travel together.

    In pieces of one width, the greatest that all lengths are multiples of.

    Args:
        lengths: list of each table's, in elements.
        addresses: `Addresses` of the tables.

    Attributes:
        width: elements of a piece.
        most: pieces of the longest row.
    """

    def __init__(self, lengths, addresses):
        self.width = math.gcd(*lengths)
        counts = np.array(lengths) // self.width
        self.most = int(counts.max())
        first = addresses.first_addresses  # (ranks, tables)
        self._largest = addresses.largest
        self._size = len(first)
        ranks = np.arange(self._size)[:, np.newaxis]
        self._first = (ranks * self._largest + first).ravel()
        self._counts = np.tile(counts, self._size)

    def pieces(self, owners, addresses):
        """How many pieces each row has.

        A number that is no address (see `routes.told_to_all`) is some row's.

        Args:
            owners: int32 `(n,)`, or one for all: the ranks that have them.
            addresses: integers `(n,)`.

        Returns:
            int32 `(n,)`.
        """
        owners = tf.cast(tf.clip_by_value(owners, 0, self._size - 1), tf.int64)
        places = tf.cast(addresses, tf.int64)
        places = tf.clip_by_value(places, 0, self._largest - 1)
        places += owners * self._largest
        index = num_up_to(tf.constant(self._first), places) - 1
        return tf.gather(tf.constant(self._counts, tf.int32), index)


class LengthCarrier:
    """Takes rows along a `Route`, and back, each in its own length.

    In memory they are as wide as the longest; the padding of shorter ones
    does not travel.

    Args:
        communicator: `Collectives` of those who send to each other.
        parts: `Route` of the rows.
        lengths: `Lengths`.
        sent, received: int32, the number of pieces of each row that goes along
            the route, and that comes.
        name: beginning of the names of its own messages.
    """

    def __init__(self, communicator, parts, lengths, sent, received, name):
        self._communicator, self._lengths = communicator, lengths
        self._sent, self._received = sent, received

        def added(pieces, ranks):
            return tf.math.unsorted_segment_sum(
                pieces, ranks, communicator.size
            )

        splits = added(sent, parts.receivers)
        largest = tf.constant(0)
        if communicator.pads:
            (largest,) = communicator.all_reduce(
                [tf.reduce_max(splits)], op="max", name=f"{name}/lengths"
            )
        self._route = Route(splits, added(received, parts.senders), largest)

    def along(self, rows, name, wire):
        send = self._communicator.all_to_all_along
        return self._send(send, rows, self._sent, self._received, name, wire)

    def back(self, rows, name, wire):
        send = self._communicator.all_to_all_back
        return self._send(send, rows, self._received, self._sent, name, wire)

    def _send(self, send, rows, pieces, arriving, name, wire):
        most, width = self._lengths.most, self._lengths.width
        rows = tf.reshape(rows, [-1, most, width])
        arrived = wire.carry(
            tf.boolean_mask(rows, tf.sequence_mask(pieces, most)),
            send,
            self._route,
            name=name,
        )
        padded = tf.scatter_nd(
            tf.where(tf.sequence_mask(arriving, most)),
            arrived,
            tf.cast([tf.size(arriving), most, width], tf.int64),
        )
        return tf.reshape(padded, [-1, most * width])
