"""Saving a model with sharded tables: rank 0 writes it whole."""

import contextlib

import keras
import tensorflow as tf

from keras_sparsity._tf import keras_models
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.tables import whole
from keras_sparsity.tables.table_variable import TableVariable

_DONE, _FAILED = -1, -2


def tables_of(model):
    """The sharded tables among a model's weights, each once."""
    tables = {}
    for variable in model.variables:
        if isinstance(variable, TableVariable):
            tables[id(variable.table)] = variable.table
    return list(tables.values())


@contextlib.contextmanager
def on_rank_zero(model):
    """Runs a block on rank 0, which may read whole tables in it.

    Every rank enters it. Rank 0 gets True and runs the block; meanwhile the
    other ranks send it their partitions of each table or slot that it reads,
    in any order. Then they get False: their block must do nothing.

    Raises:
        RuntimeError: on the other ranks, if the block fails on rank 0.
    """
    communicator = model.distribute_strategy.collectives
    if communicator.size == 1:
        yield True
        return
    readable = _readable(model)

    def tell(code):
        return int(
            communicator.broadcast(
                [tf.constant(code, tf.int32)], name="saving/next"
            )[0]
        )

    if communicator.rank == 0:
        index = {id(pieces[0]): i for i, (_, pieces) in enumerate(readable)}
        code = _FAILED
        try:
            with whole.announcing(lambda p: tell(index[id(p[0])])):
                yield True
            code = _DONE
        finally:
            tell(code)
        return
    while (code := tell(0)) >= 0:
        table, pieces = readable[code]
        whole.read_like(table, pieces)
    if code == _FAILED:
        raise RuntimeError(
            "Rank 0 failed while it saved the model; its own error says why."
        )
    yield False


def _readable(model):
    """Tables and slots with their partitions, in one order on all ranks."""
    readable = [
        (table, table.partitions)
        for table in tables_of(model)
        if table.is_sharded
    ]
    for optimizer in with_slots(model):
        readable.extend(
            place for place in optimizer.places() if place[0] is not None
        )
    return readable


def with_slots(model):
    """List of those of `optimizers_of` that may have slots of tables."""
    return [
        optimizer
        for optimizer in optimizers_of(model)
        if isinstance(optimizer, HybridOptimizer) and optimizer.built
    ]


def optimizers_of(model):
    """List of all optimizers that Keras saves with a model.

    Its own, those of the models in it, and those that either keeps beside, as
    adversarial models do.
    """
    found = {}
    for layer in [model, *keras_models.all_layers(model)]:
        for value in vars(layer).values():
            kept = value if isinstance(value, (list, tuple)) else [value]
            found.update(
                (id(each), each)
                for each in kept
                if isinstance(each, keras.optimizers.Optimizer)
            )
    return list(found.values())
