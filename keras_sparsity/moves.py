"""Tables that change their place while they are trained."""

import keras
import tensorflow as tf

from keras_sparsity import architectures, checks, collectives, touches
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.saving import tables_of
from keras_sparsity.tables.relocation import relocate
from keras_sparsity.tables.table_variable import empty, slot_like

__all__ = ["move", "repartition"]


def repartition(model, partitions):
    """Gives spread tables another number of partitions, with their slots.

    As `move` does it, without a change of the architecture: a table that every
    rank has whole only remembers the number. No rank ever holds a whole table
    for it, and training's result is the same to the bit.

    Args:
        model: as for `move`.
        partitions: dict from `ks.ShardedTable` to its number of partitions.

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
        checks.positive_integer(
            f"partitions[{table.owner_name!r}]", partitions[table]
        )
    _move(model, {t: (t.architecture, int(partitions[t])) for t in tables})


def move(model, moves):
    """Gives tables another architecture, with their slots.

    Rows go from owner to owner, or from the owners to all ranks, in blocks of
    a few MiB, and where every rank has the whole table already nothing is
    sent. Training goes on as if nothing had happened; of `"allgather"` and
    `"allreduce"` the result differs by rounding. Every rank calls it, between
    two steps: also in the middle of `fit`, from a callback's
    `on_train_batch_end`. A `tf.function` of your own that trains or reads the
    table must be made anew. In one process there is nothing to move.

    Args:
        model: the model. The slots are those of `model.optimizer`; a custom
            loop assigns its `ks.HybridOptimizer` there.
        moves: dict from `ks.ShardedTable` (`layer.table` of a
            `ShardedEmbedding`, each of `layer.tables` of a `SampledSoftmax`)
            to its architecture (see `ks.ShardedTable`), or to `("ps",
            num_partitions)`.

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


def move_for_now(model, of_tables, of_rows):
    """As `move`, where the architecture is still to be found.

    Args:
        model: the model.
        of_tables: as `moves` of `move`.
        of_rows: list of `(variable, architecture)`: an ordinary variable and
            how its gradient of rows is to travel, `"allgather"` or
            `"allreduce"`.
    """
    _move(
        model,
        {t: _checked_target(t, target) for t, target in of_tables.items()},
        is_asked_for=False,
    )
    for variable, architecture in of_rows:
        architectures.found_for_rows(variable, architecture)
        touches.discard(variable)
    if of_rows:
        _trace_anew(model)


def settle(model, strategy):
    """Gives a model's tables the architecture that they were made for.

    Those that were made outside of a strategy's scope did not know it.
    """
    communicator = strategy.collectives
    architecture = architectures.of(strategy).tables
    tables = [t for t in tables_of(model) if t.variable.is_built]
    for table in tables:
        table.shard(communicator, architecture)
    targets = {t: t.requested_architecture or architecture for t in tables}
    _move(
        model,
        {
            table: (target, table.requested_partitions)
            for table, target in targets.items()
            if target != "auto" and table.architecture not in (None, target)
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
    """`(architecture, number of partitions)` of what was asked for."""
    name = f"moves[{table.owner_name!r}]"
    count = table.requested_partitions
    if isinstance(target, tuple) and len(target) == 2:
        target, count = target
        checks.num_partitions(f"{name}[1]", count)
    checks.architecture(name, target, ", or ('ps', num_partitions)")
    return target, count


def _move(model, targets, is_asked_for=True):
    """Moves tables, in the model's order, where they are not there yet.

    Args:
        model: the model.
        targets: dict from table to `(architecture, number of partitions)`.
        is_asked_for: whether the table is to stay there, also when the model
            is compiled again.
    """
    communicator = collectives.current()
    if targets and communicator.size > 1:
        communicator.check_equal(
            {table.variable.path: to for table, to in targets.items()},
            "The moves of a model's tables",
            "Every rank must make the same moves.",
        )
    optimizer = _optimizer(model)
    layouts = {}
    for table, (architecture, count) in targets.items():
        layouts[table] = table.layout
        if communicator.size > 1:
            layouts[table] = table.layout_of(architecture, count)
        if layouts[table] is not None and not table.is_sharded:
            table.check_can_be_spread()
    moved = []
    is_changed = False
    for table, (architecture, count) in targets.items():
        table.requested_partitions = count
        if table.collectives and architecture != table.architecture:
            table.architecture = architecture
            if is_asked_for:
                table.requested_architecture = architecture
            touches.discard(table.variable)
            is_changed = True
        if layouts[table] != table.layout:
            moved.append(_move_rows(table, layouts[table], optimizer))
    if moved and optimizer:
        optimizer.follow(moved)
    if moved or is_changed:
        _trace_anew(model)


def _optimizer(model):
    """The optimizer that has the tables' slots, or None."""
    optimizer = getattr(model, "optimizer", None)
    is_following = isinstance(optimizer, HybridOptimizer) and optimizer.built
    return optimizer if is_following else None


def _move_rows(table, layout, optimizer):
    """Moves a table and its slots; returns what its optimizer is to know."""

    def rows_of(pieces):
        rows = relocate(
            table.collectives,
            pieces,
            table.layout,
            layout,
            f"{table.role}/move",
        )
        # What may still have the old ones, such as a function that was traced
        # with them, is to hold no memory, and to fail if it is called.
        for piece in pieces:
            empty(piece)
        # A rank without a partition has a piece without rows.
        return rows or [tf.zeros([0, *pieces[0].shape[1:]], pieces[0].dtype)]

    slots = optimizer.slots_of(table.variable) if optimizer else {}
    _check_by_rows(table, slots)
    slots = {
        kind: [
            slot_like(of_kind[0], rows, index)
            for index, rows in enumerate(rows_of(of_kind))
        ]
        for kind, of_kind in slots.items()
    }
    table.variable.use(table.hold(layout, rows_of(table.pieces)))
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
    """Functions that were traced use the tables where they were."""
    for kind in ("train", "test", "predict"):
        if getattr(model, f"{kind}_function", None) is not None:
            getattr(model, f"make_{kind}_function")(force=True)
