"""Each rank's part of the input.

What `fit` is given is the global batch; rank r of n trains on the rows
`[r * B // n, (r + 1) * B // n)` of each batch of B, which may be none. That
asks for the same batches on all ranks. Each rank therefore notes a
fingerprint of every global batch as it passes, and the ranks compare them
from time to time.
"""

import tensorflow as tf

from keras_sparsity import compat
from keras_sparsity.fingerprints import Fingerprints

_SHARDED = "_keras_sparsity_is_sharded"


def distribute(dataset, collectives):
    """What a strategy gives its replica of a dataset of global batches.

    Args:
        dataset: `tf.data.Dataset` of global batches, or what `shard` made.
        collectives: the processes that share each batch.

    Returns:
        `tf.data.Dataset` of this rank's parts.

    Raises:
        ValueError: if the ranks' datasets have different structures or
            numbers of batches.
    """
    if collectives.size == 1 or is_sharded(dataset):
        return dataset
    _check_is_dataset(dataset)
    collectives.check_equal(
        {
            "element_spec": str(dataset.element_spec),
            "number of batches": _cardinality_name(dataset),
        },
        "The input dataset",
        "Give every rank the same dataset: each trains on its own part of "
        "every batch. A dataset that is already each rank's own part is "
        "what `strategy.shard(dataset)` makes.",
    )
    return split_batches(
        dataset, collectives.rank, collectives.size, Fingerprints(collectives)
    )


def split_batches(dataset, rank, size, fingerprints=None):
    """This rank's rows of every batch.

    Args:
        dataset: `tf.data.Dataset` of batches of any structure: tuples, dicts,
            dense, ragged and sparse tensors, None.
        rank: which part, from 0 to `size` - 1.
        size: the number of parts.
        fingerprints: `Fingerprints` that note every whole batch, or None.

    Returns:
        `tf.data.Dataset` of as many batches, whose batch axis is None.

    Example:

    >>> batches = tf.data.Dataset.range(6).batch(4)
    >>> [part.numpy().tolist() for part in split_batches(batches, 0, 2)]
    [[0, 1], [4]]
    """
    _check_is_dataset(dataset)
    _check_is_batched(dataset)
    # Keras turns tuning off where Python workers fill the pipeline: threads
    # that read ahead would ask them for batches after the epoch's end.
    is_tuned = dataset.options().autotune.enabled is not False
    parallel = {
        "num_parallel_calls": tf.data.AUTOTUNE if is_tuned else None,
        "deterministic": True if is_tuned else None,
    }

    @tf.autograph.experimental.do_not_convert
    def split(*element):
        batch = element if len(element) > 1 else element[0]
        part = split_batch(batch, rank, size)
        if fingerprints is None:
            return part
        return part, fingerprints.of(batch)

    parts = dataset.map(split, **parallel)
    if fingerprints is not None:
        parts = fingerprints.note(parts)
    # The ranks must see the batches in the same order.
    options = tf.data.Options()
    options.deterministic = True
    parts = parts.with_options(options)
    return parts.prefetch(tf.data.AUTOTUNE) if is_tuned else parts


def split_batch(batch, rank, size):
    """One rank's rows of one batch.

    Args:
        batch: structure of tensors or arrays with a common batch axis. None
            and `tf.experimental.Optional` (Keras's None) stay as they are.
        rank: which part, from 0 to `size` - 1.
        size: the number of parts.

    Returns:
        The same structure.

    Example:

    >>> split_batch({"x": tf.range(5)}, rank=1, size=2)["x"].numpy().tolist()
    [2, 3, 4]
    """
    leaves = [x for x in tf.nest.flatten(batch) if not _is_missing(x)]
    if not leaves:
        return batch
    rows = [_num_rows(leaf) for leaf in leaves]
    if len(leaves) > 1:
        tf.debugging.assert_equal(
            tf.stack(rows[1:]),
            rows[0],
            "The tensors of a batch have different numbers of rows, so no "
            "rank's part of it can be cut. Give them the same first "
            "dimension, one row for each example.",
        )
    # int64: rank * rows overflows 32 bits for what fits into memory.
    start = rank * rows[0] // size
    stop = (rank + 1) * rows[0] // size
    return tf.nest.map_structure(
        lambda x: x if _is_missing(x) else _rows(x, start, stop), batch
    )


def is_sharded(dataset):
    """Whether a dataset comes from `shard`, with or without later steps.

    Example:

    >>> is_sharded(tf.data.Dataset.range(4).batch(2))
    False
    """
    if getattr(dataset, _SHARDED, False):
        return True
    inputs = compat.dataset_inputs(dataset)
    return bool(inputs) and all(is_sharded(each) for each in inputs)


def shard(dataset, collectives):
    """This rank's part of a dataset of global batches."""
    if collectives.size == 1 or is_sharded(dataset):
        return dataset
    parts = distribute(dataset, collectives)
    setattr(parts, _SHARDED, True)
    return parts


def _num_rows(leaf):
    if isinstance(leaf, tf.RaggedTensor):
        return tf.cast(leaf.nrows(), tf.int64)
    if isinstance(leaf, tf.SparseTensor):
        return leaf.dense_shape[0]
    shape = tf.shape(leaf, out_type=tf.int64)
    if shape.shape == (0,):
        raise ValueError(
            "A batch must have a first axis of examples, to be cut into one "
            f"part for each rank. Received a scalar: {leaf}."
        )
    return shape[0]


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
    known = leaf.shape.as_list() if leaf.shape.rank else []
    dense_shape = [stop - start]
    for axis, dimension in enumerate(known[1:], start=1):
        dense_shape.append(
            leaf.dense_shape[axis] if dimension is None else dimension
        )
    return tf.SparseTensor(
        tf.boolean_mask(leaf.indices, kept)
        - tf.stack([start] + [0] * (len(dense_shape) - 1)),
        tf.boolean_mask(leaf.values, kept),
        tf.stack([tf.cast(d, tf.int64) for d in dense_shape]),
    )


def _is_missing(leaf):
    return leaf is None or isinstance(leaf, tf.experimental.Optional)


def _cardinality_name(dataset):
    number = int(dataset.cardinality())
    return {
        tf.data.INFINITE_CARDINALITY: "infinite",
        tf.data.UNKNOWN_CARDINALITY: "unknown",
    }.get(number, number)


def _check_is_dataset(dataset):
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "Expected a `tf.data.Dataset` of global batches. Received: "
            f"{dataset} of type {type(dataset)}."
        )


def _check_is_batched(dataset):
    for spec in tf.nest.flatten(dataset.element_spec):
        shape = getattr(spec, "shape", None)
        if isinstance(spec, tf.OptionalSpec) or shape is None:
            continue
        if shape.rank == 0:
            raise ValueError(
                "Expected a dataset of global batches, each of which is cut "
                "into one part for each rank. Received elements with scalars "
                f"in them: element_spec={dataset.element_spec}. Batch it "
                "first: `dataset.batch(global_batch_size)`."
            )
