"""Moves tables to another placement while they train."""

import itertools
import weakref

import keras
import tensorflow as tf

from keras_sparsity import collectives
from keras_sparsity._tf import checks, keras_models
from keras_sparsity.conversion.saving import tables_of, with_slots
from keras_sparsity.layers import ordinary
from keras_sparsity.moves.relocation import relocate
from keras_sparsity.placement import choice
from keras_sparsity.sparsity import touches
from keras_sparsity.tables.table_variable import (
    TableVariable,
    empty,
    slot_like,
)

__all__ = ["move", "repartition"]

# From models that were compiled in a strategy's scope to their number.
_adopted = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def repartition(model, partitions):
    """Gives spread tables another number of partitions, with their slots.

    As `move`, without a change of the placement: a table that every rank has
    whole only remembers the number. No rank holds a whole table meanwhile,
    and the result of training stays the same: to the bit, but for rules that
    move untouched rows of a large table, which round when they are moved.

    Args:
        model: as for `move`.
        partitions: dict from `ks.ShardedTable` to its number of partitions.

    Raises:
        ValueError: as `move`.

    Example:

    >>> import keras, keras_sparsity as ks
    >>> layer = ks.layers.ShardedEmbedding(100, 8)
    >>> model = keras.Sequential([keras.Input((3,)), layer])
    >>> repartition(model, {layer.table: 4})

    References:
        EuroSys 3.2 (partitioning).
    """
    tables = _checked_tables(
        model, partitions, "partitions", "its number of partitions"
    )
    for table in tables:
        checks.num_partitions(
            f"partitions[{table.owner_name!r}]", partitions[table]
        )
    _move(model, {t: (t.architecture, int(partitions[t])) for t in tables})


def move(model, moves):
    """Moves tables to another placement, with their slots.

    Rows travel from owner to owner, or from the owners to all ranks, in
    blocks of a few MiB; nothing is sent if every rank has the whole table
    already. Training continues; its result differs by rounding under
    `"allgather"` and `"allreduce"`. Every rank calls it between two steps,
    also during `fit`, from a callback's `on_train_batch_end`. Make a
    `tf.function` of your own that trains or reads the table anew. One process
    has nothing to move.

    Args:
        model: the model. The slots are those of `model.optimizer` and of
            `ks.HybridOptimizer`s in other attributes; a custom loop assigns
            its own there. Other models that were compiled in a strategy's
            scope and have the table go on, too.
        moves: dict from `ks.ShardedTable` (`layer.table` of a
            `ShardedEmbedding`, each of `layer.tables` of a `SampledSoftmax`)
            to its architecture (see `ks.ShardedTable`), or to `("ps",
            num_partitions)`.

    Raises:
        ValueError: on every rank, if a key is no table of the model or not
            distributed yet, a target is unknown, ranks ask for different
            moves, the rows of a table with its regularizer, constraint or
            slots cannot be spread, or in a step.

    Example:

    >>> import keras, keras_sparsity as ks
    >>> layer = ks.layers.ShardedEmbedding(100, 8)
    >>> model = keras.Sequential([keras.Input((3,)), layer])
    >>> move(model, {layer.table: "allreduce"})
    >>> move(model, {layer.table: ("ps", 4)})

    References:
        EuroSys 3.1 (architectures), 3.2 (partitioning).
    """
    tables = _checked_tables(
        model, moves, "moves", "its architecture, or ('ps', num_partitions)"
    )
    _move(model, {t: _checked_target(t, moves[t]) for t in tables})


def move_for_now(model, targets):
    """As `move`, where the placement is still to be found.

    Args:
        targets: list of `(variable, target)`: the variable of a table, or
            another one whose gradient is of rows, and its target as in `move`.
            That of an ordinary `Embedding` may become a table's.
    """
    of_tables, others = {}, []
    for variable, target in targets:
        needs_table = choice.is_of_tables_alone(target)
        if needs_table and not isinstance(variable, TableVariable):
            _become_table(model, variable)
        if isinstance(variable, TableVariable):
            table = variable.table
            of_tables[table] = _checked_target(table, target)
        else:
            others.append((variable, target))
    _move(model, of_tables, is_asked_for=False)
    for variable, target in others:
        choice.found(variable, target)
        touches.discard(variable)
    if others:
        _trace_anew(model)


def _become_table(model, variable):
    """Makes the weight of ordinary `Embedding`s a table's, for now whole."""
    placements = choice.of_model(model)
    name = placements.of(variable).name
    touches.discard(variable)
    for layer in keras_models.all_layers(model):
        if ordinary.weight_of(layer) is variable:
            ordinary.take_over(layer).shard(placements, name)


def settle(model, strategy):
    """Gives a model's tables the placements that were asked for.

    Tables that were made outside of a strategy's scope have others.
    """
    _adopted.setdefault(model, next(_numbers))
    placements = strategy.placements
    tables = [t for t in tables_of(model) if t.variable.is_built]
    for table in tables:
        table.shard(placements)
    _move(
        model,
        {
            t: (placements.name_of_table(t), t.requested_partitions)
            for t in tables
            if t.placement is not None and placements.settles(t)
        },
        is_asked_for=False,
    )


def _checked_tables(model, moves, name, to_what):
    """The tables of a request, in the model's order."""
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
    checks.check(
        isinstance(model, keras.Model), "model", model, "a `keras.Model`"
    )
    checks.check(
        isinstance(moves, dict),
        name,
        moves,
        f"a dict from a `ks.ShardedTable` to {to_what}",
    )
    tables = tables_of(model)
    for table in moves:
        if not any(table is one for one in tables):
            raise ValueError(
                f"The keys of `{name}` must be tables of the model. Received: "
                f"{checks.spell(getattr(table, 'owner_name', table))} (of type "
                f"{type(table).__name__}). The model '{model.name}' has the "
                f"tables {[t.owner_name for t in tables]}: `layer.table` of a "
                "`ShardedEmbedding`, `layer.tables` of a `SampledSoftmax`."
            )
        is_distributed = table.collectives or collectives.current().size == 1
        if not (table.variable.is_built and is_distributed):
            raise ValueError(
                f"The table '{table.owner_name}' is not distributed yet. "
                "Build the model, and compile it inside of "
                "`strategy.scope()`, before its tables are moved."
            )
    return [table for table in tables if table in moves]


def _checked_target(table, target):
    """`(architecture, num_partitions)` of a requested move."""
    name = f"moves[{table.owner_name!r}]"
    count = table.requested_partitions
    if isinstance(target, tuple) and len(target) == 2:
        target, count = target
        checks.num_partitions(f"{name}[1]", count)
    choice.check_table(name, target, ", or ('ps', num_partitions)")
    return target, count


def _move(model, targets, is_asked_for=True):
    """Moves tables, in the model's order, that are elsewhere.

    Args:
        targets: dict from table to `(architecture, number of partitions)`.
        is_asked_for: whether the table is to stay there, also when the model
            is compiled again.
    """
    communicator = next((table.collectives for table in targets), None)
    if communicator is not None:
        communicator.check_equal(
            {table.variable.path: to for table, to in targets.items()},
            "The moves of a model's tables",
            "Every rank must make the same moves.",
        )
    holders = _holders(model, targets)
    optimizers = _optimizers(holders, communicator)
    for optimizer in optimizers:
        if optimizer.delay is not None:
            optimizer.delay.check_is_empty()
    placed = {
        table: _placement(table, name, count)
        for table, (name, count) in targets.items()
    }
    for table, placement in placed.items():
        if placement is not None and placement.layout is not None:
            table.check_can_be_spread()
    moved, changed = [], []
    for table, placement in placed.items():
        table.requested_partitions = targets[table][1]
        if placement is None:  # one process
            continue
        before = table.architecture, table.layout
        if before != (placement.name, placement.layout):
            changed.append(table)
        if placement.name != table.architecture:
            if is_asked_for:
                table.requested_architecture = placement.name
            touches.discard(table.variable)
        if placement.layout != table.layout:
            moved.append(_move_rows(table, placement, optimizers))
        table.place(placement)
    if moved:
        for index, optimizer in enumerate(optimizers):
            optimizer.follow([(v, new, s[index]) for v, new, s in moved])
    if changed:
        for holder in holders:
            _trace_anew(holder)
    for table in changed:
        table.readers.trace_anew(but_for=holders)


def _placement(table, name, num_partitions):
    """The `Placement` that a table is moved to; None in one process."""
    if table.placement is None:
        return None
    return choice.choose(
        name,
        table.collectives.size,
        lambda: table.layout_over_owners(num_partitions),
    )


def _holders(model, tables):
    """The model, and others that have some of the tables, as far as known."""
    others = [
        other
        for other in sorted(_adopted, key=_adopted.get)
        if other is not model
        and any(table in tables for table in tables_of(other))
    ]
    return [model, *others]


def _optimizers(models, communicator):
    """The optimizers that may have slots of the tables, alike on all ranks."""
    found = {
        id(optimizer): ((_adopted.get(model, -1), number), optimizer)
        for model in models
        for number, optimizer in enumerate(with_slots(model))
    }
    found = dict(found.values())
    if communicator is not None and communicator.size > 1:
        # Python may have forgotten a model on some ranks already.
        of_ranks = communicator.gather_objects(list(found), "moves/optimizers")
        found = {k: found[k] for k in found if all(k in of for of in of_ranks)}
    return list(found.values())


def _move_rows(table, placement, optimizers):
    """Moves a table and its slots.

    Returns:
        `(variable, pieces, slots)` as for `optimizer.follow`, with the slots of
        each optimizer.
    """

    def rows_of(pieces):
        rows = relocate(
            table.collectives,
            pieces,
            table.layout,
            placement.layout,
            f"{table.role}/move",
        )
        # A function that was traced with the old ones holds no memory, and
        # fails if it is called.
        for piece in pieces:
            empty(piece)
        # A rank without a partition has a piece without rows.
        return rows or [tf.zeros([0, *pieces[0].shape[1:]], pieces[0].dtype)]

    table.settle()
    slots = [optimizer.slots_of(table.variable) for optimizer in optimizers]
    for of_optimizer in slots:
        _check_by_rows(table, of_optimizer)
    slots = [
        {
            kind: [
                slot_like(of_kind[0], rows, index)
                for index, rows in enumerate(rows_of(of_kind))
            ]
            for kind, of_kind in of_optimizer.items()
        }
        for of_optimizer in slots
    ]
    table.variable.use(table.hold(placement, rows_of(table.pieces)))
    return table.variable, table.pieces, slots


def _check_by_rows(table, slots):
    for kind, of_kind in slots.items():
        for slot, piece in zip(of_kind, table.pieces, strict=True):
            if slot.shape[:1] != piece.shape[:1]:
                raise ValueError(
                    f"The optimizer keeps state of the table "
                    f"'{table.owner_name}' that is not by its rows, so the "
                    f"table cannot be moved. Received: `{kind}` of shape "
                    f"{tuple(slot.shape)}. Expected: ({piece.shape[0]}, ...)."
                )


def _trace_anew(model):
    """Drops traced functions, which use the tables where they were."""
    for kind in ("train", "test", "predict"):
        if getattr(model, f"{kind}_function", None) is not None:
            getattr(model, f"make_{kind}_function")(force=True)
