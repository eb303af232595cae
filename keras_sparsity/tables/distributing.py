"""A table's rows when it is made, and when it is distributed later."""

import numpy as np
import tensorflow as tf

from keras_sparsity.placement import choice
from keras_sparsity.tables import agreement, initial_values


def create(table, variable):
    """Creates the storage of a new table.

    Args:
        table: the `ShardedTable`.
        variable: its `TableVariable`, which may still be in its constructor.

    Returns:
        The value of the variable.
    """
    table.variable = variable
    placements = choice.entered()
    # Out of any function that is being traced: values are real.
    with tf.init_scope():
        placement = None
        if placements.communicator.size > 1:
            table.initializer = agreement.same_seed(
                table.initializer, placements.communicator
            )
            placement = _distributed(table, placements)
        rows = initial_values.draw(
            table.initializer,
            (table.num_rows, table.dim),
            variable.dtype,
            _own_rows(table, placement),
            not (placement and placement.layout),
            variable.name,
        )
        return table.hold(placement, rows)


def shard(table, placements, name=None):
    """Distributes a table that was built by one process.

    Every process keeps its own rows of rank 0's table, if the table is to be
    spread. A distributed table stays as it is.

    Args:
        table: the `ShardedTable`.
        placements: `Placements` of the strategy.
        name: that of its placement, by default the one asked for.
    """
    communicator = placements.communicator
    is_done = table.collectives is not None or not table.variable.is_built
    if is_done or communicator.size == 1:
        return
    placement = _distributed(table, placements, name)
    if placement.layout is None:
        # Rank 0's values, as of all whole variables, before the first step.
        table.place(placement)
        return
    (whole,) = communicator.broadcast(
        [tf.constant(table.variable.numpy())], name=f"{table.role}/shard"
    )
    whole = whole.numpy()
    rows = [whole[r] for r in _own_rows(table, placement)]
    table.variable.use(table.hold(placement, rows))


def _distributed(table, placements, name=None):
    """Gives it a communicator, once all ranks are seen to agree.

    Returns:
        Its `Placement`.
    """
    table.owners = agreement.owners(table, placements)
    table.collectives = placements.communicator
    return placements.of_table(table, name)


def _own_rows(table, placement):
    """Ids of the rows of each piece that this rank has by a placement."""
    layout = placement and placement.layout
    if layout is None:
        return [np.arange(table.num_rows)]
    owned = layout.owned_partitions(table.collectives.rank)
    return [layout.rows_of(partition) for partition in owned]
