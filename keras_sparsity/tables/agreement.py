"""Ranks agree on the tables of a model before they spread them."""

from keras_sparsity.collectives.differences import raise_if_different
from keras_sparsity.exchange.layout import default_owners


def owners(table, placements):
    """The ranks in the order in which they are given partitions.

    Args:
        table: the `ShardedTable`.
        placements: `Placements` of the strategy.

    Raises:
        ValueError: on every rank, if ranks define different tables.
    """
    communicator = placements.communicator
    definition = {
        "table": table.owner_name,
        "num_rows": table.num_rows,
        "dim": table.dim,
        "num_partitions": table.requested_partitions,
        "architecture": placements.name_of_table(table),
        "dtype": table.variable.dtype,
    }
    facts = communicator.gather_objects(
        [communicator.local_rank, communicator.cross_rank, definition],
        name="table/topology",
    )
    raise_if_different(
        [definition for _, _, definition in facts],
        "The model's tables",
        "Build the same model on every rank.",
    )
    places = [tuple(place) for *place, _ in facts]
    return default_owners(places, communicator.num_servers)


def same_seed(initializer, communicator):
    """The initializer, with rank 0's seed if it has one."""
    seed = getattr(initializer, "seed", None)
    if isinstance(seed, int):
        seeds = communicator.gather_objects(seed, name="table/seed")
        if seeds[0] != seed:
            config = {**initializer.get_config(), "seed": seeds[0]}
            return type(initializer).from_config(config)
    return initializer
