"""The rows that a rank asks for, each once."""

import tensorflow as tf

from keras_sparsity.data import empty_parts


class Request:
    """The rows that this rank needs in one step.

    Args:
        exchange: `Exchange`.
        requests: list of `(tables, ids)`: a group of tables, and the ids of
            its rows, an integer tensor `(n,)`.
        cut: function that removes the ids of a rank without examples: it
            needs no rows, and adds to none.

    Attributes:
        numbers: integers `(n,)`, the number of each id's row among the rows
            of all tables, see `Addresses`.
        counts: list of the number of ids of each request.
        rows: after `merge`: the numbers that owners are asked for.
        index: after `merge`: of each id, the place of its row in `rows`.
    """

    def __init__(self, exchange, requests, cut=empty_parts.cut):
        self.exchange = exchange
        addresses = exchange.addresses
        self.counts = [tf.size(ids) for _, ids in requests]
        ids = [cut(ids) for _, ids in requests]
        self.groups = [exchange.groups.index(tuple(of)) for of, _ in requests]
        # Without their signs negative ids are larger than all others.
        self._largest = [
            tf.reduce_max(tf.bitcast(tf.cast(each, tf.int64), tf.uint64))
            for each in ids
        ]
        self._sizes = [tf.size(each) for each in ids]
        self.numbers = tf.concat(
            [
                tf.cast(each, addresses.row_dtype)
                + tf.constant(addresses.first_rows[group], addresses.row_dtype)
                for each, group in zip(ids, self.groups, strict=True)
            ],
            axis=0,
        )
        self.rows = self.index = None

    def merge(self):
        """Finds the rows; needless where none are asked for."""
        if self.exchange.options.merges:
            self.rows, self.index = tf.unique(self.numbers)
        else:
            self.rows = self.numbers
            self.index = tf.range(tf.size(self.numbers))

    def split(self, of_ids):
        """Splits a tensor of all ids by request."""
        return (
            [of_ids] if len(self._sizes) == 1 else tf.split(of_ids, self._sizes)
        )

    def are_inside(self):
        """Of each request, whether all ids lie in its tables: bool tensors."""
        return [
            largest
            < tf.constant(self.exchange.groups[group][0].num_rows, tf.uint64)
            for largest, group in zip(self._largest, self.groups, strict=True)
        ]

    def outside(self):
        """The group that an id is outside of, and the id: int64 `(2,)`."""
        which = tf.argmin(tf.cast(self.are_inside(), tf.int32))
        return tf.stack(
            [
                tf.gather(tf.constant(self.groups, tf.int64), which),
                tf.bitcast(tf.stack(self._largest), tf.int64)[which],
            ]
        )

    def ids_of(self, group):
        """The distinct ids that a group of tables is asked for."""
        first, *after = self.exchange.addresses.first_rows[group:]
        is_of_group = self.rows >= first
        if after:
            is_of_group &= self.rows < after[0]
        return tf.boolean_mask(self.rows, is_of_group) - first
