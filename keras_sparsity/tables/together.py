"""Rows of several tables, in as few messages as one table's."""

import tensorflow as tf

from keras_sparsity.tables.exchange import pull, shaped


def gather_together(requests, ahead=None, following=None):
    """Rows of several tables, in as few messages as one table's.

    Of spread tables those of one dtype travel together, frozen ones, of which
    no gradient is sent, by themselves; rows that are asked for several times
    travel once. Where rows are to come ahead, those of each length travel by
    themselves.

    Args:
        requests: list of `(table, ids, dtype)`, as for `ShardedTable.gather`.
        ahead: function of the tables that travel together, which gives their
            `Ahead`, or None where there is none; or None.
        following: for each request, the ids of the next step, if there is an
            `ahead`.

    Returns:
        List of tensors `(..., dim)`.
    """
    results = [None] * len(requests)
    together = {}
    for index, (table, ids, dtype) in enumerate(requests):
        if table.is_sharded:
            variable = table.variable
            kind = (variable.dtype, variable.trainable, ahead and table.dim)
            together.setdefault(kind, []).append(index)
        else:
            results[index] = table.gather(ids, dtype=dtype)
    for indices in together.values():
        tables = [requests[i][0] for i in indices]
        dtypes = {requests[i][2] for i in indices}

        def asked(ids, tables=tables, indices=indices):
            flat = [tf.reshape(ids[i], [-1]) for i in indices]
            return [([t], of) for t, of in zip(tables, flat, strict=True)]

        of_these = ahead and ahead(tables)
        pulled = pull(
            asked([ids for _, ids, _ in requests]),
            of_these,
            asked(following) if of_these else None,
            cast_to=dtypes.pop() if len(dtypes) == 1 else None,
        )
        for index, rows in zip(indices, pulled, strict=True):
            table, ids, dtype = requests[index]
            results[index] = tf.cast(shaped(rows, ids), dtype)
    return results


def gather_side_by_side(tables, ids, dtype):
    """The same rows of several tables, in as few messages as one table's.

    Args:
        tables: list of tables with as many rows.
        ids, dtype: as for `ShardedTable.gather`.

    Returns:
        List of tensors `(..., dim)`, one for each table.
    """
    kinds = {(table.layout, table.variable.dtype) for table in tables}
    if len(kinds) > 1 or not tables[0].is_sharded:
        return [table.gather(ids, dtype=dtype) for table in tables]
    (rows,) = pull([(tables, tf.reshape(ids, [-1]))], cast_to=dtype)
    columns = tf.split(rows, [table.dim for table in tables], axis=1)
    return [
        tf.cast(shaped(of_table, ids), dtype)
        for table, of_table in zip(tables, columns, strict=True)
    ]
