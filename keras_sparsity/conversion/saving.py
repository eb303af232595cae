"""Saving a model with sharded tables: rank 0 writes it whole."""

import contextlib
import functools
import inspect

import keras
import tensorflow as tf

from keras_sparsity._tf import contexts, keras_models, patches
from keras_sparsity.conversion.copying import is_of_this_package
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.tables import whole
from keras_sparsity.tables.table_variable import TableVariable

_DONE, _FAILED = -1, -2

_being_written = []  # methods of `write`


def have_models_save():
    """Has `keras.saving.save_model` call `model.save`, if that is bound.

    Each rank would write the same file. `save_weights` likewise.
    """

    def save(stock, method, model, *args, **kwargs):
        # What a model's own `save` saves beside is rank 0's alone, too.
        is_bound = is_of_this_package(vars(model).get(method))
        if _being_written or not is_bound:
            return stock(model, *args, **kwargs)
        given = inspect.signature(stock).bind(model, *args, **kwargs).arguments
        del given["model"]
        given = {k: v for k, v in given.items() if v is not None}
        # Each rank has been asked already.
        given.pop("overwrite", None)
        return getattr(model, method)(**given)

    def calling(method):
        return lambda stock: functools.partial(save, stock, method)

    for patch, method in patches.SAVES.items():
        patch.stay(calling(method))


def write(method, args, kwargs):
    """Calls Keras's method of a model that writes its file."""
    with contexts.on_top(_being_written, method):
        method(*args, **kwargs)


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
    layers = [model, *keras_models.all_layers(model)]
    found = {
        id(optimizer): optimizer
        for layer in layers
        for _, optimizer in named_optimizers(layer)
    }
    return list(found.values())


def named_optimizers(layer):
    """Pairs of the places where a layer keeps optimizers, and these.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.critics = {"first": keras.optimizers.Adam()}
    >>> [name for name, _ in named_optimizers(model)]
    ["critics['first']"]
    """
    for name, value in vars(layer).items():
        yield from _optimizers_in(name, value)


def _optimizers_in(name, value):
    """Those of a value that may be a container, with the places in it."""
    if isinstance(value, keras.optimizers.Optimizer):
        yield name, value
        return
    items = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, each in items:
        # Vocabularies are long.
        if isinstance(each, (keras.optimizers.Optimizer, dict, list, tuple)):
            yield from _optimizers_in(f"{name}[{key!r}]", each)
