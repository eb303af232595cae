"""Rows of a batch, whatever its structure."""

import keras
import numpy as np
import tensorflow as tf


def split_batch(batch, rank, size):
    """One rank's rows of one batch.

    Args:
        batch: structure of tensors or arrays with a common batch axis. None
            and `tf.experimental.Optional` (Keras's None) stay as they are.
        rank, size: which part, and the number of parts.

    Example:

    >>> split_batch({"x": tf.range(5)}, rank=1, size=2)["x"].numpy().tolist()
    [2, 3, 4]
    """
    number = num_examples(batch)
    if number is None:
        return batch
    start, stop = bounds(number, rank, size)
    return rows_between(batch, start, stop)


def unpacked(batch):
    """The inputs, labels and weights of a batch, as Keras's steps take them.

    A `train_step` of the user's may take other tuples: all of it is inputs.

    Example:

    >>> unpacked((1, 2)), unpacked((1, 2, 3, 4))
    ((1, 2, None), ((1, 2, 3, 4), None, None))
    """
    try:
        return keras.utils.unpack_x_y_sample_weight(batch)
    except ValueError:
        return batch, None, None


def mapped(dataset, function, **options):
    """`dataset.map` of a function of one element, whatever its structure."""
    # `map` hands over the entries of a tuple, of a tuple of one too.
    is_tuple = type(dataset.element_spec) is tuple

    @tf.autograph.experimental.do_not_convert
    def call(*element):
        return function(element if is_tuple else element[0])

    return dataset.map(call, **options)


def bounds(number, rank, size):
    """The first example of a rank's part, and the one behind its last.

    Ranks from `size` on, dedicated servers, have no part.
    """
    if rank >= size:
        return number, number
    return rank * number // size, (rank + 1) * number // size


def num_examples(batch):
    """The number of a batch's examples: int64; None without any tensor."""
    leaves = [x for x in tf.nest.flatten(batch) if not _is_missing(x)]
    if not leaves:
        return None
    rows = [num_rows(leaf) for leaf in leaves]
    if len(leaves) > 1:
        tf.debugging.assert_equal(
            tf.stack(rows[1:]),
            rows[0],
            "The tensors of a batch have different numbers of rows, so no "
            "rank's part of it can be cut. Give them the same first "
            "dimension, one row for each example.",
        )
    return rows[0]


def rows_between(batch, start, stop):
    """The rows of a batch from `start` on, to that before `stop`."""
    return tf.nest.map_structure(
        lambda x: x if _is_missing(x) else _rows(x, start, stop), batch
    )


def inner_shape(leaf):
    """The dimensions of a dense or sparse tensor but for its rows: int64."""
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[1:]
    return tf.shape(leaf, out_type=tf.int64)[1:]


def empty_like(leaf, shape):
    """A tensor of that shape without elements, dense or sparse as `leaf`."""
    if isinstance(leaf, tf.SparseTensor):
        return tf.SparseTensor(
            tf.zeros([0, leaf.shape.rank], tf.int64),
            tf.zeros([0], leaf.dtype),
            shape,
        )
    return tf.zeros(shape, leaf.dtype)


def without_rows(spec):
    """A value of the spec with no rows in it; unknown dimensions are 1."""
    if isinstance(spec, tf.RaggedTensorSpec):
        inner = spec.shape[spec.ragged_rank + 1 :]
        value = tf.zeros([0, *[dim or 1 for dim in inner]], spec.dtype)
        for _ in range(spec.ragged_rank):
            value = tf.RaggedTensor.from_row_splits(
                value, tf.zeros([1], spec.row_splits_dtype)
            )
        return value
    if isinstance(spec, tf.SparseTensorSpec):
        shape = [0, *[dim or 1 for dim in spec.shape[1:]]]
        return tf.SparseTensor(
            tf.zeros([0, len(shape)], tf.int64),
            tf.zeros([0], spec.dtype),
            shape,
        )
    if isinstance(spec, tf.TensorSpec):
        rank_known = spec.shape.rank is not None
        inner = [dim or 1 for dim in spec.shape[1:]] if rank_known else []
        return tf.zeros([0, *inner], spec.dtype)
    if isinstance(spec, tf.OptionalSpec):
        return tf.experimental.Optional.empty(None)
    return None


def num_rows(leaf):
    """The number of rows of a dense, ragged or sparse tensor: int64."""
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    if not tf.is_tensor(leaf):
        shape = np.shape(leaf)
    elif leaf.shape.rank == 0:
        shape = ()
    else:
        shape = tf.shape(leaf, out_type=tf.int64)
    if isinstance(shape, tuple) and not shape:
        raise ValueError(
            "A batch must have a first axis of examples, to be cut into one "
            f"part for each rank. Received a scalar: {leaf}. Batch a dataset "
            "first: `dataset.batch(global_batch_size)`."
        )
    return tf.cast(shape[0], tf.int64)


def _rows(leaf, start, stop):
    """`leaf[start:stop]` with None for the batch axis."""
    if isinstance(leaf, tf.RaggedTensor):
        part = leaf[start:stop]
        if tf.executing_eagerly():
            return part
        splits = tf.compat.v1.placeholder_with_default(part.row_splits, [None])
        return tf.RaggedTensor.from_row_splits(
            part.values, splits, validate=False
        )
    if isinstance(leaf, tf.SparseTensor):
        return _sparse_rows(leaf, start, stop)
    if not tf.is_tensor(leaf):
        return leaf[int(start) : int(stop)]
    part = leaf[start:stop]
    if tf.executing_eagerly() or leaf.shape.rank is None:
        return part
    return tf.compat.v1.placeholder_with_default(part, [None, *leaf.shape[1:]])


def _sparse_rows(leaf, start, stop):
    row = leaf.indices[:, 0]
    kept = tf.logical_and(row >= start, row < stop)
    indices = tf.boolean_mask(leaf.indices, kept)
    is_row = tf.one_hot(0, tf.shape(indices)[1], dtype=tf.int64)
    if leaf.shape.rank is None:
        dense_shape = tf.concat([[stop - start], leaf.dense_shape[1:]], 0)
    else:  # a list keeps the known sizes
        dense_shape = [stop - start]
        for axis, dimension in enumerate(leaf.shape[1:], start=1):
            if dimension is None:
                dimension = leaf.dense_shape[axis]
            dense_shape.append(tf.cast(dimension, tf.int64))
        dense_shape = tf.stack(dense_shape)
    return tf.SparseTensor(
        indices - start * is_row,
        tf.boolean_mask(leaf.values, kept),
        dense_shape,
    )


def _is_missing(leaf):
    return leaf is None or isinstance(leaf, tf.experimental.Optional)
