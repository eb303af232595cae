"""Every rank holds the whole variable; gradients are all-reduced."""

import tensorflow as tf

from keras_sparsity.data import empty_parts
from keras_sparsity.placement import server_sums, slices
from keras_sparsity.placement.base import Placement, Reducer

# The beginning of its messages' names.
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

    def begin(self, update):
        if update.is_of_rows:
            rows = empty_parts.cut_slices(update.gradient)
            update.touched = rows.indices, None
            if update.keeps_rows:
                update.counts = slices.counts(rows)
            update.gradient = slices.dense(rows, update.variable.shape[0])

    def finish(self, updates):
        counted = [u for u in updates if u.counts is not None]
        tensors = [u.gradient for u in updates] + [u.counts for u in counted]
        sums = [None] * len(tensors)
        with tf.name_scope("all_reduce"):
            for name, bucket in self._options.buckets(tensors).items():
                of_bucket = self._sums([tensors[i] for i in bucket], name)
                for index, value in zip(bucket, of_bucket, strict=True):
                    sums[index] = value
        for update in updates:
            update.gradient = sums.pop(0)
        for update, counts in zip(counted, sums, strict=True):
            update.gradient = slices.touched(update.gradient, counts)

    def _sums(self, tensors, name):
        """The sums of one message's tensors."""
        name = f"{ROLE}/{name}"
        tensors = empty_parts.selected(tensors)
        wire = self._options.wire(tensors[0].dtype)
        if wire.dtype == wire.source:
            return self._communicator.all_reduce(tensors, name=name)
        # A ring would add up in the narrow dtype, servers in the wide one.
        return server_sums.at_all(
            self._communicator, self._options, tensors, f"{name}/"
        )

    @classmethod
    def updated_bytes(cls, own, whole, size, num_slots):
        # The dense gradient is written, and read, too.
        return min(whole, own * size) * (1 + num_slots) + 2 * whole

    @classmethod
    def shares_message(cls, variable):
        return True
