"""Lookups of every row of a table, which may be those of tied weights."""

import logging

import numpy as np
import tensorflow as tf

_logger = logging.getLogger(__name__)


def tell(table, ids):
    """Says once what makes a lookup of all rows needless.

    Args:
        table: a spread `ShardedTable`, which notes that it was said.
        ids: integer tensor.
    """
    if table.is_whole_lookup_told or ids.shape.as_list() != [table.num_rows]:
        return
    known = tf.get_static_value(ids)
    if known is None or not np.array_equal(known, np.arange(table.num_rows)):
        return
    table.is_whole_lookup_told = True
    if table.collectives.rank == 0:
        _logger.warning(
            "All %d rows of '%s' travel to every process in each step: the "
            "table is looked up whole, as for the logits of tied weights. "
            "`ks.layers.SampledSoftmax(%d, num_sampled, table=embedding)` "
            "needs the rows of a sample only.",
            table.num_rows,
            table.owner_name,
            table.num_rows,
        )
