"""The rows that a rank owns and others ask for."""

import tensorflow as tf

from keras_sparsity.collectives.engine import num_up_to
from keras_sparsity.exchange.layout import Piece, row_of
from keras_sparsity.exchange.routes import is_marked, marked
from keras_sparsity.sparsity import touches


class OwnedRows:
    """Rows of this rank, by the addresses that others have asked for.

    Args:
        exchange: `Exchange`.
        addresses: integers `(n,)` of the dtype of rows' numbers, see
            `checked`.
    """

    def __init__(self, exchange, addresses):
        self._exchange, self.addresses = exchange, addresses
        # A rank without rows is asked for none.
        self._pieces = exchange.addresses.pieces or [Piece(0, 0, 0, 0)]
        self._piece, self._local = None, addresses
        if len(self._pieces) > 1:
            starts = [piece.start for piece in self._pieces]
            starts = tf.constant(starts, addresses.dtype)
            self._piece = num_up_to(starts, addresses) - 1
            self._local = addresses - tf.gather(starts, self._piece)

    def rows(self, read=tf.gather):
        """The owner's values: `(n, width)`. Owners read rows here only.

        Args:
            read: function of a `tf.Variable` and local rows.
        """
        if self._piece is None:
            rows = self._read(self._pieces[0], self._local, read)
            return tf.stop_gradient(rows)
        count = len(self._pieces)
        places = tf.range(tf.size(self.addresses))
        places = tf.dynamic_partition(places, self._piece, count)
        locals_ = tf.dynamic_partition(self._local, self._piece, count)
        rows = [
            self._read(piece, local, read)
            for piece, local in zip(self._pieces, locals_, strict=True)
        ]
        return tf.stop_gradient(tf.dynamic_stitch(places, rows))

    def _read(self, piece, local, read):
        """Rows of a partition: those of the group's tables side by side."""
        exchange = self._exchange
        rows = [
            read(table.partitions[piece.slot].value, local)
            for table in exchange.groups[piece.table]
        ]
        if exchange.columns is not None:
            return rows[0][:, slice(*exchange.columns)]
        rows = rows[0] if len(rows) == 1 else tf.concat(rows, axis=1)
        return padded(rows, exchange.row_lengths[piece.table], exchange.width)

    def gradients(self, at_owner):
        """The gradient of each table: list of `tf.IndexedSlices` by id.

        Args:
            at_owner: gradients `(n, width)` of the rows.
        """
        exchange, width = self._exchange, self._exchange.width
        if exchange.columns is not None:
            start, stop = exchange.columns
            width = exchange.tables[0].dim
            at_owner = tf.pad(at_owner, [[0, 0], [start, width - stop]])
        # Users see the rows' ids in gradients.
        partition = self._of_each([p.partition for p in self._pieces])
        count = self._of_each(
            [
                exchange.groups[p.table][0].layout.num_partitions
                for p in self._pieces
            ]
        )
        ids = tf.cast(row_of(partition, self._local, count), tf.int64)
        of_groups = self._by_group(at_owner, ids)
        slices = []
        for group, (values, ids) in zip(
            exchange.groups, of_groups, strict=True
        ):
            start = 0
            for table in group:
                stop = start + table.dim
                of_table = values
                if table.dim < width:
                    of_table = values[:, start:stop]
                shape = tf.constant([table.num_rows, table.dim], tf.int64)
                slices.append(tf.IndexedSlices(of_table, ids, shape))
                start = stop
        return slices

    def _of_each(self, facts):
        """The fact of each row's piece: a vector, or a scalar of one piece."""
        dtype = self.addresses.dtype
        if self._piece is None:
            return tf.constant(facts[0], dtype)
        return tf.gather(tf.constant(facts, dtype), self._piece)

    def _by_group(self, *tensors):
        """Splits tensors of all rows by the group of tables."""
        count = len(self._exchange.groups)
        if count == 1:
            return [tensors]
        group = self._of_each([piece.table for piece in self._pieces])
        group = tf.cast(group, tf.int32) + tf.zeros_like(self._local, tf.int32)
        parts = [tf.dynamic_partition(t, group, count) for t in tensors]
        return list(zip(*parts, strict=True))

    def note_touches(self, route, request):
        """Counts the touches of these rows where a step is sampled.

        Args:
            route: `RowRoute` by which they were asked for.
            request: `Request` of this rank.
        """
        exchange, groups = self._exchange, self._exchange.groups
        first = exchange.addresses.first_addresses[exchange.communicator.rank]

        def asked():
            places = self.addresses - self._of_each(
                [first[piece.table] for piece in self._pieces]
            )
            # Each group's share of the padding of all of them together.
            largest = tf.cast(route.parts.largest, tf.int64)
            num_all = tf.maximum(tf.size(self.addresses, tf.int64), 1)
            found = []
            for index, (of_group, ranks) in enumerate(
                self._by_group(places, route.ranks)
            ):
                share = largest * tf.size(of_group, tf.int64) // num_all
                own_ids = request.ids_of(index) if route.is_by_machine else None
                noted = of_group, ranks, share, own_ids
                found += [noted] * len(groups[index])
            return found

        touches.note([table.variable for table in exchange.tables], asked)


def padded(rows, length, width):
    """Rows of a length, as wide as the longest."""
    if length == width:
        return rows
    return tf.pad(rows, [[0, 0], [0, width - length]])


def checked(exchange, received):
    """The received addresses, of a dtype to compute with, if each is one.

    Raises:
        tf.errors.InvalidArgumentError: in the step, on every rank, if an id
            of any rank lies outside of its table.
    """
    tables = [group[0] for group in exchange.groups]
    which, offending = tf.unstack(marked(received))
    names = tf.constant([table.owner_name for table in tables])
    limits = tf.constant([table.num_rows for table in tables], tf.int64)
    check = tf.raw_ops.Assert(
        condition=tf.logical_not(tf.reduce_any(is_marked(received))),
        data=outside_message(
            tf.gather(names, which), offending, tf.gather(limits, which)
        ),
        name="ids_are_inside",
    )
    with tf.control_dependencies([check]):
        return tf.identity(tf.cast(received, exchange.addresses.row_dtype))


def outside_message(owner_name, offending, num_rows):
    """The error of an id outside of a table: data of an Assert."""
    # In pieces, for a name and a number may be tensors.
    return [
        tf.strings.join(["'", owner_name, "' received the id"]),
        offending,
        tf.strings.join(
            [
                "but ids must lie in [0, ",
                tf.as_string(num_rows),
                "). Stock Keras reads the last row for -1; map such ids to a "
                "row of their own.",
            ]
        ),
    ]
