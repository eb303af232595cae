"""Every rank holds the whole variable; gradients are all-reduced."""

import functools

import tensorflow as tf

from keras_sparsity.data import empty_parts
from keras_sparsity.placement import server_sums, slices
from keras_sparsity.placement.base import Placement, Reducer

# What the names of its messages begin with.
ROLE = "optimizer/dense"


class Mirrored(Placement):
    """Dense gradients are all-reduced, gradients of rows made dense before.

    References:
        EuroSys 3.1 (AllReduce).
    """

    name = "allreduce"

    def reducer(self, is_of_rows):
        return AllReduce


class AllReduce(Reducer):
    """Sums dense gradients in few messages.

    None of the messages waits for the gradients of the others.
    """

    path = "allreduce"

    def __init__(self, communicator, options):
        super().__init__(communicator, options)
        self._counts = {}  # of the rows with a gradient, by update

    def begin(self, update):
        if update.is_of_rows:
            rows = empty_parts.cut_slices(update.gradient)
            update.touched = rows.indices, None
            if update.keeps_rows:
                self._counts[id(update)] = slices.counts(rows)
            update.gradient = slices.dense(rows, update.variable.shape[0])

    def finish(self, updates):
        of_rows = [u for u in updates if u.is_of_rows and u.keeps_rows]
        reduced = self._sums(
            [u.gradient for u in updates]
            + [self._counts.pop(id(u)) for u in of_rows]
        )
        for update in updates:
            update.gradient = reduced.pop(0)
        for update, counts in zip(of_rows, reduced, strict=True):
            update.gradient = slices.touched(update.gradient, counts)

    def _sums(self, gradients):
        of_dtypes = {}
        for index, gradient in enumerate(gradients):
            of_dtypes.setdefault(gradient.dtype, []).append(index)
        results = [None] * len(gradients)
        with tf.name_scope("all_reduce"):
            for dtype, indices in of_dtypes.items():
                sums = self._sums_of(dtype, [gradients[i] for i in indices])
                for index, value in zip(indices, sums, strict=True):
                    results[index] = value
        return results

    def _sums_of(self, dtype, gradients):
        """The sums of gradients of one dtype."""
        send = self._communicator.all_reduce
        wire = self._options.wire(dtype)
        if wire.dtype != wire.source:
            # A ring would add up in the narrow dtype, servers in the wide one.
            send = functools.partial(
                server_sums.at_all, self._communicator, self._options
            )
        results = [None] * len(gradients)
        for number, bucket in enumerate(self._options.buckets(gradients)):
            sums = send(
                empty_parts.selected([gradients[i] for i in bucket]),
                name=f"{ROLE}/{dtype.name}/{number}",
            )
            for index, value in zip(bucket, sums, strict=True):
                results[index] = value
        return results

    @classmethod
    def updated_bytes(cls, own, whole, size, num_slots):
        # The dense gradient is written, and read, too.
        return min(whole, own * size) * (1 + num_slots) + 2 * whole

    @classmethod
    def shares_message(cls, variable):
        return True
