"""Rows of several tables, in as few messages as one table's."""

import tensorflow as tf

from keras_sparsity.exchange.pull import Pull, in_turn, shaped


def gather_together(requests, ahead=None, following=None, then=None):
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
        then: what is needed behind all of these rows: the arguments of
            `gather_side_by_side`, of spread tables; None for nothing.

    Returns:
        List of tensors `(..., dim)`; and the same of `then`, if there is any.
    """
    results = [None] * len(requests)
    together, pulls = {}, []
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
        pulls.append(
            Pull(
                asked([ids for _, ids, _ in requests]),
                of_these,
                asked(following) if of_these else None,
                cast_to=dtypes.pop() if len(dtypes) == 1 else None,
            )
        )
    if then:
        pulls.append(_pull_side_by_side(*then))
    pulled = in_turn(pulls)
    last = _side_by_side(pulled.pop(), *then) if then else None
    for indices, rows in zip(together.values(), pulled, strict=True):
        for index, of_request in zip(indices, rows, strict=True):
            table, ids, dtype = requests[index]
            results[index] = tf.cast(shaped(of_request, ids), dtype)
    return results, last


def gather_side_by_side(tables, ids, dtype):
    """The same rows of several tables, in as few messages as one table's.

    Args:
        tables: list of tables with as many rows.
        ids, dtype: as for `ShardedTable.gather`.

    Returns:
        List of tensors `(..., dim)`, one for each table.
    """
    if not travel_side_by_side(tables):
        return [table.gather(ids, dtype=dtype) for table in tables]
    (rows,) = in_turn([_pull_side_by_side(tables, ids, dtype)])
    return _side_by_side(rows, tables, ids, dtype)


def travel_side_by_side(tables):
    """Whether each owner has the same rows of all of these tables."""
    kinds = {(table.layout, table.variable.dtype) for table in tables}
    return len(kinds) == 1 and tables[0].is_sharded


def _pull_side_by_side(tables, ids, dtype):
    return Pull([(tables, tf.reshape(ids, [-1]))], cast_to=dtype)


def _side_by_side(rows, tables, ids, dtype):
    (rows,) = rows
    columns = tf.split(rows, [table.dim for table in tables], axis=1)
    return [
        tf.cast(shaped(of_table, ids), dtype)
        for table, of_table in zip(tables, columns, strict=True)
    ]
