"""The logits of all classes, from weights that are spread over processes."""

import tensorflow as tf

from keras_sparsity.tables import whole


def full_logits(hidden, kernel, bias=None):
    """`hidden @ kernel.T + bias`.

    With several processes either the weights come to the hidden states or the
    hidden states to the weights, whichever sends less. A rank with n of the N
    hidden states receives about

        num_classes * (dim + 1) numbers, if every rank gets the whole table,
        n * num_classes + N * dim, if owners compute the logits of their rows.

    N is far less than num_classes where this layer is of use, so n <= dim
    decides: batches go the first way, a few examples the second.

    Args:
        hidden: `(n, dim)`; ranks may differ in n, which may be 0.
        kernel: `ShardedTable` `(num_classes, dim)`.
        bias: `ShardedTable` `(num_classes, 1)`, or None.

    Returns:
        `(n, num_classes)`, of the dtype of `hidden`. No gradient flows to
        tables that are spread.
    """
    if not kernel.is_sharded:
        return _from_whole_tables(hidden, kernel, bias)
    name = f"{kernel.owner_name}/logits"
    num_hidden = kernel.collectives.all_gather(
        tf.shape(hidden)[:1], name=f"{name}/num_hidden"
    )
    num_hidden = tf.ensure_shape(num_hidden, [kernel.collectives.size])
    return tf.cond(
        tf.reduce_max(num_hidden) <= kernel.dim,
        lambda: _from_owners(hidden, num_hidden, kernel, bias, name),
        lambda: _from_whole_tables(hidden, kernel, bias),
    )


def _from_whole_tables(hidden, kernel, bias):
    rows = tf.cast(whole.tensor(kernel), hidden.dtype)
    logits = tf.matmul(hidden, rows, transpose_b=True)
    if bias is not None:
        logits += tf.cast(whole.tensor(bias), hidden.dtype)[:, 0]
    return logits


def _from_owners(hidden, num_hidden, kernel, bias, name):
    """Each owner's logits of all ranks' hidden states, sent back to them."""
    communicator = kernel.collectives
    everyone = communicator.all_gather(hidden, name=f"{name}/hidden")
    ranks = range(communicator.size)
    widths = [kernel.layout.num_stored_rows(rank) for rank in ranks]
    mine = widths[communicator.rank]
    # One of the two tables may have been moved by itself.
    is_beside = bias is not None and bias.layout == kernel.layout
    if mine > 0:
        rows = tf.cast(whole.stored_rows(kernel), hidden.dtype)
        logits = tf.matmul(everyone, rows, transpose_b=True)
        if is_beside:
            logits += tf.cast(whole.stored_rows(bias), hidden.dtype)[:, 0]
    else:
        # A product without columns has ended a process in oneDNN (SIGABRT,
        # TensorFlow 2.21; not reproduced in isolation).
        logits = everyone[:, :0]
    # Flat, since ranks own different numbers of classes.
    flat, _ = communicator.all_to_all(
        tf.reshape(logits, [-1]), num_hidden * mine, name=f"{name}/columns"
    )
    n = tf.shape(hidden)[0]
    blocks = tf.split(flat, [n * width for width in widths])
    columns = tf.concat(
        [
            tf.reshape(block, [n, width])
            for block, width in zip(blocks, widths, strict=True)
        ],
        axis=1,
    )
    order = kernel.layout.stored_position(tf.range(kernel.num_rows))
    logits = tf.gather(columns, order, axis=1)
    if bias is not None and not is_beside:
        logits += tf.cast(whole.tensor(bias), hidden.dtype)[:, 0]
    return tf.ensure_shape(logits, [hidden.shape[0], kernel.num_rows])
