"""Every rank holds the whole variable; gradients of rows are gathered."""

import tensorflow as tf

from keras_sparsity.data import empty_parts
from keras_sparsity.exchange.addresses import narrowest
from keras_sparsity.placement import slices
from keras_sparsity.placement.base import Placement, Reducer
from keras_sparsity.placement.mirrored import AllReduce

# The beginning of its messages' names.
ROLE = "optimizer/rows/"


class Gathered(Placement):
    """Gradients of rows are gathered, dense ones all-reduced.

    References:
        EuroSys 3.1 (AllGatherv).
    """

    name = "allgather"

    def reducer(self, is_of_rows):
        return AllGather if is_of_rows else AllReduce


class AllGather(Reducer):
    """Gives every rank the gradients of rows of all ranks, by variable."""

    path = "allgather"

    def begin(self, update):
        rows = empty_parts.cut_slices(update.gradient)
        with tf.name_scope("all_gather"):
            if self._options.merges:
                rows = slices.merged(rows)
            gathered, counts = self._gathered(rows, update.variable)
        update.gradient = gathered
        update.touched = gathered.indices, counts

    def finish(self, updates):
        del updates  # gathered in `begin`

    def _gathered(self, rows, variable):
        """The slices of all ranks, one rank after the other.

        A mark, which is no row's index, precedes the indices of each rank and
        separates them for the counting of touches. A message of its own in
        sampled steps alone would hang ranks that disagree about these.

        Returns:
            `tf.IndexedSlices`, and a function that gives how many of them
            each rank has sent.
        """
        name = f"{ROLE}{variable.path}"
        dtype = narrowest(variable.shape[0])
        mark = tf.constant([dtype.max], dtype)
        wire = self._options.gradient_wire(
            rows.values.dtype,
            rows.values.shape[1:].num_elements(),
            name,
            self._communicator.rank,
        )
        values = wire.carry(
            rows.values, self._communicator.all_gather, name=f"{name}/values"
        )
        marked = self._communicator.all_gather(
            tf.concat([mark, tf.cast(rows.indices, dtype)], axis=0),
            name=f"{name}/ids",
        )
        marked = tf.cast(marked, rows.indices.dtype)
        is_index = tf.not_equal(marked, dtype.max)
        indices = tf.boolean_mask(marked, is_index)

        def counts():
            starts = tf.where(tf.logical_not(is_index))[:, 0]
            ends = tf.concat([starts[1:], [tf.size(marked, tf.int64)]], axis=0)
            return ends - starts - 1

        return tf.IndexedSlices(values, indices, rows.dense_shape), counts
