"""Tables that change their place while they are trained."""

import dataclasses
import functools

import keras
import tensorflow as tf

from keras_sparsity import checks, touches
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.saving import tables_of
from keras_sparsity.tables.relocation import relocate
from keras_sparsity.tables.table_variable import Partition, empty, slot_like


def repartition(model, partitions):
    """Gives spread tables another number of partitions, with their slots.

    The rows go from owner to owner in blocks, so that no rank ever holds a
    whole table. Training goes on as if nothing had happened: its result does
    not depend on the number of partitions. Every rank calls it, between two
    steps: also in the middle of `fit`, from a callback's
    `on_train_batch_end`. A `tf.function` of your own that trains or reads the
    table must be made anew. In one process there is nothing to move.

    Args:
        model: the model. The slots are those of `model.optimizer`; a custom
            loop assigns its `ks.HybridOptimizer` there.
        partitions: dict from `ks.ShardedTable` (`layer.table` of a
            `ShardedEmbedding`, one of `layer.tables` of a `SampledSoftmax`)
            to its number of partitions.

    Example:

    >>> import keras, keras_sparsity as ks
    >>> layer = ks.layers.ShardedEmbedding(100, 8)
    >>> model = keras.Sequential([keras.Input((3,)), layer])
    >>> repartition(model, {layer.table: 4})

    References:
        EuroSys 3.2 (partitioning).
    """
    _check_between_steps()
    tables = _checked_tables(model, partitions)
    for table, count in partitions.items():
        checks.positive_integer(f"partitions[{table.owner_name!r}]", count)
    optimizer = _optimizer(model)
    spread = [table for table in tables if table.is_sharded]
    if spread:
        spread[0].collectives.check_equal(
            {t.variable.path: int(partitions[t]) for t in tables},
            "The numbers of partitions that tables are to have",
            "Every rank must make the same moves, also of tables in the same "
            "order.",
        )
    moves = []
    for table in tables:
        count = int(partitions[table])
        table.requested_partitions = count
        if table.is_sharded and count != table.layout.num_partitions:
            moves.append(_move(table, count, optimizer))
    if optimizer and moves:
        optimizer.follow(moves)
    if moves:
        _trace_anew(model)


def _check_between_steps():
    is_in_step = not tf.executing_eagerly() or (
        tf.distribute.has_strategy()
        and not tf.distribute.in_cross_replica_context()
    )
    if is_in_step:
        raise ValueError(
            "Tables were to be moved inside of a step or of a tf.function, "
            "which uses them where they are. Move them between two steps, for "
            "example from a callback's `on_train_batch_end`."
        )


def _checked_tables(model, moves):
    """The tables of a request, in the model's order."""
    checks.check(
        isinstance(model, keras.Model), "model", model, "a `keras.Model`"
    )
    checks.check(
        isinstance(moves, dict),
        "partitions",
        moves,
        "a dict from a `ks.ShardedTable` to its number of partitions",
    )
    tables = tables_of(model)
    for table in moves:
        if table not in tables:
            raise ValueError(
                "Only tables of the model can be moved. Received: "
                f"{getattr(table, 'owner_name', table)!r} (of type "
                f"{type(table).__name__}). The model '{model.name}' has the "
                f"tables {[t.owner_name for t in tables]}: `layer.table` of a "
                "`ShardedEmbedding`, `layer.tables` of a `SampledSoftmax`."
            )
        if not table.variable.is_built:
            raise ValueError(
                f"The table '{table.owner_name}' has no rows yet. Build the "
                "model before its tables are moved."
            )
    return [table for table in tables if table in moves]


def _optimizer(model):
    """The optimizer that has the tables' slots, or None."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return None
    if not isinstance(optimizer, HybridOptimizer):
        raise ValueError(
            f"The optimizer of the model '{model.name}' is not wrapped, so it "
            f"cannot follow tables that are moved. Received: {optimizer}. "
            "Write `with strategy.scope(): model.compile(...)`, or "
            "`model.optimizer = ks.HybridOptimizer(optimizer)`."
        )
    return optimizer if optimizer.built else None


def _move(table, num_partitions, optimizer):
    """Moves a table and its slots; returns what its optimizer is to know."""
    old = table.layout
    new = dataclasses.replace(old, num_partitions=num_partitions)

    def moved(pieces, make):
        rows = relocate(
            table.collectives, pieces, old, new, f"{table.role}/move"
        )
        # A rank without a partition has a piece without rows.
        rows = rows or [tf.zeros([0, *pieces[0].shape[1:]], pieces[0].dtype)]
        made = [make(values, index) for index, values in enumerate(rows)]
        # What may still hold the old ones, such as a function that was traced
        # with them, is to hold no memory, and to fail if it is called.
        for piece in pieces:
            empty(piece)
        return made

    slots = optimizer.slots_of(table.variable) if optimizer else {}
    _check_by_rows(table, slots, optimizer)
    table.partitions = moved(
        table.partitions, functools.partial(Partition, table.variable)
    )
    table.layout = new
    touches.discard(table.variable)
    slots = {
        kind: moved(of_kind, functools.partial(slot_like, of_kind[0]))
        for kind, of_kind in slots.items()
    }
    return table.variable, table.partitions, slots


def _check_by_rows(table, slots, optimizer):
    for kind, of_kind in slots.items():
        for slot, partition in zip(of_kind, table.partitions, strict=True):
            if slot.shape[:1] != partition.shape[:1]:
                raise ValueError(
                    f"The optimizer {optimizer.inner_optimizer.name} keeps "
                    f"state of the table '{table.owner_name}' that is not by "
                    f"its rows, so the table cannot be moved. Received: "
                    f"`{kind}` of shape {tuple(slot.shape)}. Expected: "
                    f"({partition.shape[0]}, ...)."
                )


def _trace_anew(model):
    """Functions that were traced use the tables where they were."""
    for kind in ("train", "test", "predict"):
        if getattr(model, f"{kind}_function", None) is not None:
            getattr(model, f"make_{kind}_function")(force=True)
