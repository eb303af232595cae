"""The engine of a single process, which sends nothing."""

import tensorflow as tf

from keras_sparsity.collectives.engine import Engine, Route
from keras_sparsity.collectives.wire import Wire


class LocalEngine(Engine):
    """The operations of a group of one process, in a run by some engine."""

    rank = 0
    size = 1

    def __init__(self, name="local"):
        self.name = name

    def reduce_wire(self, dtype):
        return Wire(dtype, dtype)

    move_wire = reduce_wire

    def all_reduce(self, flat, op, name):
        del op, name
        return tf.identity(flat)

    def all_to_all(self, rows, splits, name):
        route = Route(splits, tf.identity(splits), tf.reduce_max(splits))
        return self.all_to_all_along(rows, route, name), route

    def all_to_all_along(self, rows, route, name):
        del route, name
        return tf.identity(rows)

    def all_gather(self, rows, name, counts=None):
        del name, counts
        return tf.identity(rows)

    def broadcast(self, flat, root, name):
        del root, name
        return tf.identity(flat)

    def split(self, groups, label):
        return self

    def abort(self, message):
        pass

    def close(self):
        pass
