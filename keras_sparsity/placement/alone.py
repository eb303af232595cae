"""The only process holds the whole variable."""

from keras_sparsity.data import empty_parts
from keras_sparsity.placement.base import Placement, Reducer
from keras_sparsity.placement.gathered import AllGather
from keras_sparsity.placement.mirrored import AllReduce


class Own(Reducer):
    """Takes this process's own dense gradients."""

    path = "allreduce"  # of no bytes
    role = AllReduce.role

    @classmethod
    def reduce(cls, updates, communicator, options):
        pass


class OwnRows(Reducer):
    """Takes this process's own gradients of rows."""

    path = "allgather"  # of no bytes
    role = AllGather.role

    @classmethod
    def reduce(cls, updates, communicator, options):
        for update in updates:
            update.gradient = empty_parts.cut_slices(update.gradient)
            update.touched = update.gradient.indices, None


class Alone(Placement):
    """Nothing travels."""

    name = "alone"
    reducers = Own, OwnRows
