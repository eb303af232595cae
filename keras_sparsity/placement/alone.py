"""The only process holds the whole variable."""

from keras_sparsity.data import empty_parts
from keras_sparsity.placement.base import Placement, Reducer


class Alone(Placement):
    """Nothing travels."""

    name = "alone"

    def reducer(self, is_of_rows):
        return OwnRows if is_of_rows else Own


class Own(Reducer):
    """Takes this process's own dense gradients."""

    path = "allreduce"  # of no bytes

    def begin(self, update):
        del update

    def finish(self, updates):
        del updates


class OwnRows(Reducer):
    """Takes this process's own gradients of rows."""

    path = "allgather"  # of no bytes

    def begin(self, update):
        update.gradient = empty_parts.cut_slices(update.gradient)
        update.touched = update.gradient.indices, None

    def finish(self, updates):
        del updates
