"""Rows of several tables, in as few messages as one table's."""

import tensorflow as tf

from keras_sparsity.exchange.pull import PullNow, in_turn, shaped


def gather_together(requests, options, prefetched=None, then=None):
    """Rows of several tables, in as few messages as one table's.

    Of spread tables those of one dtype travel together, frozen ones, of which
    no gradient is sent, by themselves; rows that are asked for several times
    travel once. With `prefetched`, rows of each length travel by themselves.

    Args:
        requests: list of `(table, ids, dtype)`, as for `ShardedTable.gather`.
        options: `Options` of the strategy.
        prefetched: function that returns the `Pull` of requests that travel
            together if the step before asked for their rows, else None. Its
            arguments: the requests as `PullNow` takes them, their indices,
            and the dtype that all rows are cast to, or None. None: nothing
            was asked for.
        then: the first arguments of `gather_side_by_side`, of spread tables,
            for rows that come behind all others; None for nothing.

    Returns:
        List of tensors `(..., dim)`; and the same of `then`, if there is any.
    """
    results = [None] * len(requests)
    together, pulls = {}, []
    for index, (table, ids, dtype) in enumerate(requests):
        if table.sends_messages:
            variable = table.variable
            kind = variable.dtype, variable.trainable, prefetched and table.dim
            together.setdefault(kind, []).append(index)
        else:
            results[index] = table.gather(ids, dtype=dtype)
    for indices in together.values():
        asked = [
            ([table], tf.reshape(ids, [-1]))
            for table, ids, _ in (requests[i] for i in indices)
        ]
        dtypes = {requests[i][2] for i in indices}
        cast_to = dtypes.pop() if len(dtypes) == 1 else None
        pull = prefetched and prefetched(asked, indices, cast_to)
        pulls.append(pull or PullNow(asked, options, cast_to=cast_to))
    if then:
        pulls.append(_pull_side_by_side(*then, options))
    pulled = in_turn(pulls)
    last = _side_by_side(pulled.pop(), *then) if then else None
    for indices, rows in zip(together.values(), pulled, strict=True):
        for index, of_request in zip(indices, rows, strict=True):
            table, ids, dtype = requests[index]
            results[index] = tf.cast(shaped(of_request, ids), dtype)
    return results, last


def gather_side_by_side(tables, ids, dtype, options):
    """The same rows of several tables, in as few messages as one table's.

    Args:
        tables: list of tables with as many rows.
        ids, dtype: as for `ShardedTable.gather`.
        options: `Options` of the strategy.

    Returns:
        List of tensors `(..., dim)`, one for each table.
    """
    if not travel_side_by_side(tables):
        return [table.gather(ids, dtype=dtype) for table in tables]
    (rows,) = in_turn([_pull_side_by_side(tables, ids, dtype, options)])
    return _side_by_side(rows, tables, ids, dtype)


def travel_side_by_side(tables):
    """Whether each owner has the same rows of all of these tables."""
    kinds = {(table.layout, table.variable.dtype) for table in tables}
    return len(kinds) == 1 and tables[0].is_sharded


def _pull_side_by_side(tables, ids, dtype, options):
    return PullNow([(tables, tf.reshape(ids, [-1]))], options, cast_to=dtype)


def _side_by_side(rows, tables, ids, dtype):
    (rows,) = rows
    columns = tf.split(rows, [table.dim for table in tables], axis=1)
    return [
        tf.cast(shaped(of_table, ids), dtype)
        for table, of_table in zip(tables, columns, strict=True)
    ]
