"""Every rank holds the whole variable; gradients are all-reduced."""

import tensorflow as tf

from keras_sparsity.data import empty_parts
from keras_sparsity.placement import server_sums, slices
from keras_sparsity.placement.base import Placement, Reducer


class AllReduce(Reducer):
    """Sums dense gradients in few messages.

    None of the messages waits for the gradients of the others.
    """

    path = "allreduce"
    role = "optimizer/dense"
    makes_dense = True

    @classmethod
    def reduce(cls, updates, communicator, options):
        dense, counts = [], {}
        for update in updates:
            gradient = update.gradient
            if update.is_of_rows:
                rows = empty_parts.cut_slices(gradient)
                update.touched = rows.indices, None
                if update.keeps_rows:
                    counts[len(dense)] = slices.counts(
                        rows, update.variable.shape[0]
                    )
                gradient = slices.dense(rows, update.variable.shape[0])
            dense.append(gradient)
        sums = _sums([*dense, *counts.values()], communicator, options)
        for update in updates:
            update.gradient = sums.pop(0)
        for index, summed in zip(counts, sums, strict=True):
            update = updates[index]
            update.gradient = slices.touched(update.gradient, summed)

    @classmethod
    def updated_bytes(cls, own, whole, size, num_slots):
        # The dense gradient is written, and read, too.
        return min(whole, own * size) * (1 + num_slots) + 2 * whole

    @classmethod
    def shares_message(cls, variable):
        return True


def _sums(tensors, communicator, options):
    """The sums of tensors over the ranks, in messages of one dtype."""
    sums = [None] * len(tensors)
    with tf.name_scope("all_reduce"):
        for number, bucket in options.buckets(tensors).items():
            of_rank = empty_parts.selected([tensors[i] for i in bucket])
            name = f"{AllReduce.role}/{number}"
            wire = options.wire(of_rank[0].dtype)
            if wire.dtype == wire.source:
                of_all = communicator.all_reduce(of_rank, name=name)
            else:
                # A ring would add up in the narrow dtype, servers in the wide.
                of_all = server_sums.at_all(
                    communicator, options, of_rank, f"{name}/"
                )
            for index, value in zip(bucket, of_all, strict=True):
                sums[index] = value
    return sums


class Mirrored(Placement):
    """Dense gradients are all-reduced, gradients of rows made dense before.

    References:
        EuroSys 3.1 (AllReduce).
    """

    name = "allreduce"
    reducers = AllReduce, AllReduce
