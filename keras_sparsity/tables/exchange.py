"""Rows between those that need them and those that own them."""

import tensorflow as tf

from keras_sparsity import architectures, touches


def pull(table, ids):
    """Rows of a spread table, from their owners.

    Unique ids go to their owners and the rows come back; the gradient's rows,
    summed over this rank's ids, travel the ids' route once more.

    Args:
        table: the `ShardedTable`.
        ids: int64 tensor `(n,)`.

    Returns:
        Tensor `(n, dim)`.

    References:
        EuroSys 3.1 (pull and push), 4.3 (one gradient for each row).
    """
    with tf.name_scope("pull"):  # as a profiler's trace is to call it
        return _pull(table, ids)


def _pull(table, ids):
    role = table.role
    communicator = table.collectives
    if architectures.of().merges:
        unique, inverse = tf.unique(ids)
    else:
        unique, inverse = ids, tf.range(tf.size(ids))
    sorted_ids, positions, splits = _by_owner(table, unique)
    received_ids, route = communicator.all_to_all(
        sorted_ids, splits, name=f"{role}/pull/ids"
    )
    with tf.control_dependencies(table.assert_inside(received_ids)):
        received_ids = tf.identity(received_ids)
    # Where the row of each id arrives.
    arrival = tf.gather(positions, inverse)

    rows = communicator.all_to_all_back(
        tf.stop_gradient(_read_rows(table, received_ids)),
        route,
        name=f"{role}/pull/rows",
    )
    num_sent = tf.shape(sorted_ids)[0]

    @tf.custom_gradient
    def expand(anchor, rows):
        del anchor

        def push(gradient):
            table.check_under_strategy()
            with tf.name_scope("push"):
                # Summed per row here, then along the ids' own route: each
                # owner already knows which rows these are.
                summed = tf.math.unsorted_segment_sum(
                    gradient, arrival, num_sent
                )
                at_owner = communicator.all_to_all_along(
                    summed, route, name=f"{role}/push/rows"
                )
                touches.note(
                    table.variable,
                    received_ids,
                    route.received_splits,
                    route.largest,
                )
            return row_gradient(table, at_owner, received_ids), None

        return tf.gather(rows, arrival), push

    return expand(tf.convert_to_tensor(table.variable.value), rows)


def row_gradient(table, values, ids):
    shape = tf.constant([table.num_rows, table.dim], tf.int64)
    return tf.IndexedSlices(values, ids, shape)


def _by_owner(table, unique):
    """Unique ids sorted by owner, the position of each, and the splits.

    If an id lies outside the table it is sent to every owner in place of
    all others, so that the check that each owner makes fails on all.
    """
    size = table.collectives.size
    outside = (unique < 0) | (unique >= table.num_rows)
    valid = tf.logical_not(tf.reduce_any(outside))
    count = tf.size(unique)
    owner = table.layout.owner(tf.where(outside, tf.zeros_like(unique), unique))
    order = tf.concat(
        tf.dynamic_partition(tf.range(count), owner, size), axis=0
    )

    def send_valid():
        return (
            tf.gather(unique, order),
            tf.math.bincount(owner, minlength=size, maxlength=size),
        )

    def send_offending():
        offending = tf.boolean_mask(unique, outside)[0]
        return tf.fill([size], offending), tf.ones([size], tf.int32)

    sorted_ids, splits = tf.cond(valid, send_valid, send_offending)
    return sorted_ids, tf.math.invert_permutation(order), splits


def _read_rows(table, ids):
    """Rows of ids that this rank owns, each partition by itself."""
    local_rows = table.layout.local_row(ids)
    if len(table.partitions) == 1:
        return tf.gather(table.partitions[0].value, local_rows)
    slots = table.layout.slot(ids)
    count = len(table.partitions)
    positions = tf.dynamic_partition(tf.range(tf.size(ids)), slots, count)
    wanted = tf.dynamic_partition(local_rows, slots, count)
    rows = [
        tf.gather(partition.value, local)
        for partition, local in zip(table.partitions, wanted, strict=True)
    ]
    return tf.dynamic_stitch(positions, rows)


def split_gradient(table, gradient):
    """The gradient of each of this rank's partitions.

    Args:
        gradient: `tf.IndexedSlices` of rows that this rank owns, as
            `gather`'s gradient gives them.

    Returns:
        List of `tf.IndexedSlices` by local row, one for each partition.
    """
    local_rows = table.layout.local_row(tf.cast(gradient.indices, tf.int64))
    if len(table.partitions) == 1:
        rows, values = [local_rows], [gradient.values]
    else:
        slots = table.layout.slot(tf.cast(gradient.indices, tf.int64))
        count = len(table.partitions)
        rows = tf.dynamic_partition(local_rows, slots, count)
        values = tf.dynamic_partition(gradient.values, slots, count)
    return [
        tf.IndexedSlices(value, row, tf.constant(list(p.shape), tf.int64))
        for p, row, value in zip(table.partitions, rows, values, strict=True)
    ]
