"""Marks of datasets that are one rank's part already."""

import tensorflow as tf

from keras_sparsity._tf import checks, keras_input

# For errors.
OF_ARRAYS = (
    "arrays become one by "
    "`tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)`"
)

_SHARDED = "_keras_sparsity_is_sharded"
_IN_STEP = "_keras_sparsity_agrees_in_step"
_ORIGINAL = "_keras_sparsity_original"
_BY = "_keras_sparsity_reordered_by"


def is_sharded(dataset):
    """Whether a dataset comes from `shard`, with or without later steps.

    Example:

    >>> is_sharded(tf.data.Dataset.range(4).batch(2))
    False
    """
    if getattr(dataset, _SHARDED, False):
        return True
    inputs = keras_input.dataset_inputs(dataset)
    return bool(inputs) and all(is_sharded(each) for each in inputs)


def in_order(data):
    """Data whose examples come in the order that one process sees.

    A dataset that is split by files or by elements gives each rank examples
    from all over a batch: predictions would be put together in another order.

    Args:
        data: the input of `predict`.

    Returns:
        The dataset from before `shard`, if `data` is one that reorders; else
        `data` itself.

    Raises:
        ValueError: if steps of the pipeline come after `shard`.
    """
    if not isinstance(data, tf.data.Dataset) or not is_sharded(data):
        return data
    sharded = data
    while not getattr(sharded, _SHARDED, False):
        sharded = keras_input.dataset_inputs(sharded)[0]
    original = getattr(sharded, _ORIGINAL)
    if original is None:
        return data
    if sharded is not data:
        raise ValueError(
            "`predict` returns outputs in the dataset's order, which a "
            "dataset that is split by files or elements has lost. Received: "
            "a dataset with steps after `strategy.shard(dataset)`. Give "
            "`predict` the dataset without `strategy.shard`, or shard it last."
        )
    return original


def reordered_by(dataset):
    """How a dataset was split, if by that global batches hold other examples.

    Returns:
        "files", "elements", or "worker" if each worker has made its own; None
        of a dataset whose batches are the same for any number of workers.

    Example:

    >>> reordered_by(tf.data.Dataset.range(4).batch(2)) is None
    True
    """
    own = getattr(dataset, _BY, None)
    inputs = [] if own else keras_input.dataset_inputs(dataset)
    found = filter(None, map(reordered_by, inputs))
    return own or next(found, None)


def mark_as_part(
    dataset, original=None, agrees_in_step=False, reordered_by=None
):
    """Has a strategy take the dataset for this rank's part, as it is.

    Each rank's dataset must then have as many batches as the others'.

    Args:
        original: the global batches, if the parts have another order.
        agrees_in_step: whether the ranks send messages before each batch.
        reordered_by: see the function `reordered_by`.
    """
    check_is_dataset(dataset)
    # A new object: the user's may serve as a whole elsewhere.
    dataset = dataset.with_options(tf.data.Options())
    setattr(dataset, _SHARDED, True)
    setattr(dataset, _ORIGINAL, original)
    setattr(dataset, _IN_STEP, agrees_in_step)
    setattr(dataset, _BY, reordered_by)
    return dataset


def agrees_in_step(dataset):
    """Whether the ranks send messages before each batch of a part."""
    while not getattr(dataset, _SHARDED, False):
        dataset = keras_input.dataset_inputs(dataset)[0]
    return getattr(dataset, _IN_STEP)


def check_is_dataset(dataset):
    """Raises TypeError for other input."""
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"Expected a `tf.data.Dataset` of global batches; {OF_ARRAYS}. "
            f"Received: {checks.spell(dataset)} of type {type(dataset)}."
        )


def check_nothing_reads_ahead(dataset):
    """Raises where ranks would send messages before they need to."""
    reads_ahead = None
    while not getattr(dataset, _SHARDED, False):
        kind = type(dataset).__name__
        if "Prefetch" in kind or "Parallel" in kind:
            reads_ahead = kind.strip("_")
        dataset = keras_input.dataset_inputs(dataset)[0]
    if reads_ahead and agrees_in_step(dataset):
        raise ValueError(
            "The number of this dataset's batches is not known beforehand, so "
            "the ranks agree in each step whether any has one left, and no "
            f"step behind may read ahead. Received: {reads_ahead} behind "
            "`strategy.shard(dataset)`. Shard it last: it prefetches itself. "
            "`fit(class_weight=...)` is such a map of Keras's: have the "
            "dataset give sample weights in its place, `(x, y, weights)`."
        )
