"""Ids that must lie inside of a table: checked in the step."""

import tensorflow as tf

from keras_sparsity.collectives import order
from keras_sparsity.exchange.owned_rows import outside_message


def gather_whole(table, whole, ids):
    """Rows `(..., dim)` of a whole table that this rank has.

    Args:
        table: the `ShardedTable`.
        whole: its rows: a tensor or `tf.Variable`.
        ids: integer tensor `(...)`.
    """
    if ids.dtype not in (tf.int32, tf.int64):
        ids = tf.cast(ids, tf.int64)
    with tf.control_dependencies(assert_inside(table, ids)):
        return tf.gather(whole, ids)


def assert_inside(table, ids):
    """Operations that fail if an id of int32 or int64 is outside."""
    # Without their signs negative ids are the largest ones, so that one
    # extreme is enough; that of no ids at all is 0. In a small model each
    # operation counts: see benchmarks/single_process.py.
    unsigned = tf.uint32 if ids.dtype == tf.int32 else tf.uint64
    largest = tf.reduce_max(tf.bitcast(ids, unsigned))
    limit = tf.constant(min(table.num_rows, ids.dtype.max + 1), unsigned)
    check = tf.raw_ops.Assert(
        condition=largest < limit,
        data=outside_message(
            table.owner_name, tf.bitcast(largest, ids.dtype), table.num_rows
        ),
        name="ids_are_inside",
    )
    return [] if check is None else [check]


def check_inside(table, ids):
    """Operations that fail, on every rank, if any rank's id is outside.

    For ids that are not gathered; `gather` checks those it is given.
    """
    if not table.is_sharded:
        return assert_inside(table, ids)
    ids = tf.concat([tf.cast(tf.reshape(ids, [-1]), tf.int64), [0]], 0)
    (extremes,) = table.collectives.all_reduce(
        [tf.stack([tf.reduce_max(ids), -tf.reduce_min(ids)])],
        op="max",
        name=f"{table.role}/check_inside",
    )
    checked = assert_inside(table, tf.stack([extremes[0], -extremes[1]]))
    order.hold_sums(checked)
    return checked
