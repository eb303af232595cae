"""Each rank's part of the input.

What `fit` is given is the global batch; rank r of n trains on the rows
`[r * B // n, (r + 1) * B // n)` of each batch of B, which may be none. That
asks for the same batches on all ranks. Each rank therefore notes a
fingerprint of every global batch as it passes, and the ranks compare them
from time to time.
"""

import contextlib
import logging

import tensorflow as tf

from keras_sparsity._tf import checks, keras_input
from keras_sparsity.data.batches import split_batch
from keras_sparsity.data.dataset_graph import CannotSplit, DatasetGraph
from keras_sparsity.data.equal_steps import ending_together, with_equal_steps
from keras_sparsity.data.fingerprints import Fingerprints, fingerprint
from keras_sparsity.data.of_servers import (
    agreed,
    agreed_number,
    parts_of_server,
)
from keras_sparsity.data.stand_ins import counted_part, with_stand_ins

__all__ = ["shard"]

_SHARDED = "_keras_sparsity_is_sharded"
_told = set()  # reasons to split late, which would be told in each epoch
_IN_STEP = "_keras_sparsity_agrees_in_step"
_ORIGINAL = "_keras_sparsity_original"
_counts = []  # not empty while what `distribute` makes is `Counted`
_SAME_DATASET = (
    "Give every rank the same dataset: each trains on its own part of every "
    "batch. Seed its shuffles and generators alike on every rank. What is "
    "each rank's own part already, only `strategy.shard(dataset)` can make."
)


def distribute(dataset, collectives):
    """A replica's part of a dataset of global batches.

    Args:
        dataset: `tf.data.Dataset` of global batches, or result of `shard`.
        collectives: the processes that share each batch.

    Returns:
        `tf.data.Dataset` of this rank's parts. A dedicated server's is not
        read: its parts are stand-ins, as many as the workers have parts.

    Raises:
        ValueError: if the ranks' datasets have different structures or
            numbers of batches.
    """
    if collectives.size == 1:
        return dataset
    _check_is_dataset(dataset)
    if is_sharded(dataset):
        _check_nothing_reads_ahead(dataset)
        return with_stand_ins(dataset) if _counts else dataset
    number = agreed_number(
        dataset, _SAME_DATASET, collectives, _counts and _counts[-1]()
    )
    if collectives.is_server:
        return parts_of_server(dataset, number, collectives, bool(_counts))
    parts = split_batches(
        dataset,
        collectives.rank,
        collectives.num_workers,
        Fingerprints(collectives),
    )
    if collectives.num_servers and number == tf.data.UNKNOWN_CARDINALITY:
        return ending_together(parts, collectives)
    return parts


def repeat_on_all(dataset, collectives):
    """A dataset whose batches every process reads whole.

    Args:
        dataset: `tf.data.Dataset` of batches, the same on all ranks.
        collectives: the processes.

    Returns:
        `tf.data.Dataset` of these batches, which `check_inputs` compares.

    Raises:
        ValueError: if the dataset is a part, or as `distribute`.
    """
    if collectives.size == 1:
        return dataset
    _check_is_dataset(dataset)
    if is_sharded(dataset):
        raise ValueError(
            "Every process of a model in stages reads whole batches: the "
            "first stage the inputs, the last one the labels. Received: a "
            "part of a dataset, from `shard`. Give the dataset itself."
        )
    check_is_alike(dataset, collectives)
    return split_batches(dataset, 0, 1, Fingerprints(collectives))


def check_is_alike(dataset, collectives):
    """Raises ValueError unless the ranks' datasets have one structure."""
    agreed_number(dataset, _SAME_DATASET, collectives)


@contextlib.contextmanager
def for_steps(num_batches):
    """While entered, `distribute` gives `Counted` parts, as steps take them.

    A custom loop gets parts as they are, which may have no examples.

    Args:
        num_batches: function without arguments: the number of an epoch's
            batches, where Keras knows it; else None.
    """
    _counts.append(num_batches)
    try:
        yield
    finally:
        _counts.pop()


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

    cut = counted_part if _counts else split_batch
    # `map` hands over the entries of a tuple, of a tuple of one too.
    is_tuple = type(dataset.element_spec) is tuple

    @tf.autograph.experimental.do_not_convert
    def split(*element):
        batch = element if is_tuple else element[0]
        part = cut(batch, rank, size)
        if fingerprints is None:
            return part
        return part, fingerprint(batch)

    parts = dataset.map(split, **parallel)
    if fingerprints is not None:
        parts = fingerprints.note(parts)
    # The ranks must see the batches in the same order.
    options = tf.data.Options()
    options.deterministic = True
    parts = parts.with_options(options)
    return parts.prefetch(tf.data.AUTOTUNE) if is_tuned else parts


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
    original = getattr(sharded, _ORIGINAL, None)
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


def mark_as_part(dataset):
    """Has a strategy take the dataset for this rank's part, as it is.

    Each rank's dataset must then have as many batches as the others'.
    """
    _check_is_dataset(dataset)
    # A new object: the user's may serve as a whole elsewhere.
    dataset = dataset.with_options(tf.data.Options())
    setattr(dataset, _SHARDED, True)
    return dataset


def own_parts(dataset, collectives):
    """Has a strategy take each worker's dataset for its parts, as it is."""
    _check_is_dataset(dataset)
    if not collectives.num_servers:
        return mark_as_part(dataset)
    (number,) = collectives.broadcast(
        [dataset.cardinality()], name="input/own_number"
    )
    if collectives.is_server:
        dataset = parts_of_server(dataset, int(number), collectives)
    elif number == tf.data.UNKNOWN_CARDINALITY:
        dataset = ending_together(dataset, collectives)
    return mark_as_part(dataset)


def shard(dataset, collectives, by=None):
    """This rank's part of a dataset of global batches, for large input.

    `fit` cuts each rank's part from batches that every rank has read and
    decoded whole. This splits earlier where the pipeline allows it, and has
    the rank read or decode its own examples only:

    - by files, where it reads a list of files whose number is a multiple of
      the ranks' (or at least 8 for each): each rank reads files of its own;
    - by elements, where maps stand between its elements and its batches:
      each rank maps every n-th element only. Maps right before the batches
      are saved without any other change: each global batch then holds the
      examples it would have held. If it is shuffled behind the maps, each
      rank shuffles its own elements;
    - by batches elsewhere, as `fit` does.

    For the first two the global batch size must be a multiple of the number
    of ranks, and nothing but maps and prefetching may follow the batches (a
    map there sees this rank's rows only). What the ranks cannot be sure to
    agree on is split by batches too: Python generators, orders that vary,
    unseeded shuffles. Rank 0 logs each reason once, unless `by` asks for
    batches.

    In each step every rank gets at most its share of the global batch, and
    each example is read once, by one rank. All ranks get the same number of
    steps: ranks that run out get batches without rows until the last one has
    ended. Where the number of steps is unknown beforehand (files, filters)
    the ranks agree in each step with one small message; this must be the
    last step of the pipeline then, and prefetches itself.

    `predict` returns outputs in the order of the dataset. So it reads a dataset
    that is split by files or elements as if it were not sharded.

    Args:
        dataset: `tf.data.Dataset` of global batches, the same on all ranks.
        collectives: the processes that share each batch.
        by: "files", "elements" or "batches", to have that or an error; the
            first possible one when None.

    Returns:
        `tf.data.Dataset` of this rank's parts, which a strategy recognises.
        In one process the dataset itself; on a dedicated server, which reads
        none, as many stand-ins.

    Raises:
        ValueError: on every rank, if their datasets differ or cannot be
            split as asked.

    Example:

    >>> import tensorflow as tf, keras_sparsity as ks
    >>> strategy = ks.HybridStrategy()
    >>> batches = tf.data.Dataset.range(8).batch(4)
    >>> part = ks.data.shard(batches, strategy.collectives)
    >>> [batch.tolist() for batch in part.as_numpy_iterator()]
    [[0, 1, 2, 3], [4, 5, 6, 7]]

    References:
        EuroSys 4.1 (`shard`). `tf.data.experimental.AutoShardPolicy` names
        the same ways: FILE, DATA.
    """
    if by is not None:
        checks.one_of("by", by, ("files", "elements", "batches"), ", or None")
    _check_is_dataset(dataset)
    checks.processes("collectives", collectives)
    if is_sharded(dataset):
        return dataset
    _check_is_batched(dataset)
    if collectives.size == 1:
        return dataset
    graph = place = reason = None
    if by != "batches" and not collectives.is_server:
        try:
            graph = DatasetGraph(dataset)
            place = graph.best_split(collectives.num_workers, by)
        except CannotSplit as error:
            reason = str(error)
    plan = {"split by": place.by if place else "batches"}
    if place:
        plan.update(pipeline=graph.steps, constants=graph.fingerprint)
    if collectives.num_servers:
        plan["reason"] = reason
    plan = agreed(plan, "The dataset to shard", _SAME_DATASET, collectives)
    if plan["split by"] == "batches":
        _tell_of_late_split(plan.get("reason", reason), by, collectives)
        return mark_as_part(distribute(dataset, collectives))
    return _split_early(dataset, graph, place, collectives)


def _tell_of_late_split(reason, by, collectives):
    """Logs why a dataset is split by batches; raises if `by` forbids it."""
    if by in ("files", "elements"):
        raise ValueError(
            f"The dataset cannot be split as asked (by={by!r}): {reason}. "
            "Change it, or leave `by` to be chosen."
        )
    if reason and reason not in _told and collectives.rank == 0:
        _told.add(reason)
        logging.getLogger(__name__).warning(
            "`shard` splits this dataset late: every process reads and maps "
            "all examples, and keeps its part of each batch, as `fit` does "
            "without `shard`, because %s. (by='batches' asks for that.)",
            reason,
        )


def _split_early(dataset, graph, place, collectives):
    """This rank's part, split by files or elements."""
    part = number = None
    if place:
        part = graph.split(place, collectives.rank, collectives.num_workers)
        part = part.with_options(dataset.options())
        counted = dataset if place.keeps_batches else part
        number = int(counted.cardinality())
    numbers = collectives.gather_objects(number, name="input/num_steps")
    numbers = numbers[: collectives.num_workers]
    # As many as the worker with most has.
    num_steps = min(numbers) if min(numbers) < 0 else max(numbers)
    if part is None:
        part = parts_of_server(dataset, num_steps, collectives)
    else:
        part = with_equal_steps(part, num_steps, collectives)
    part = mark_as_part(part)
    setattr(part, _IN_STEP, num_steps == tf.data.UNKNOWN_CARDINALITY)
    setattr(part, _ORIGINAL, dataset)
    return part


def _check_is_dataset(dataset):
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "Expected a `tf.data.Dataset` of global batches. Received: "
            f"{checks.spell(dataset)} of type {type(dataset)}."
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


def _check_nothing_reads_ahead(dataset):
    """Raises where ranks would send messages before they need to."""
    reads_ahead = None
    while not getattr(dataset, _SHARDED, False):
        kind = type(dataset).__name__
        if "Prefetch" in kind or "Parallel" in kind:
            reads_ahead = kind.strip("_")
        dataset = keras_input.dataset_inputs(dataset)[0]
    if reads_ahead and getattr(dataset, _IN_STEP, False):
        raise ValueError(
            "How many batches this dataset has is not known beforehand, so "
            "the ranks agree in each step whether any has one left; nothing "
            f"may read ahead of that. Received: {reads_ahead} behind "
            "`strategy.shard(dataset)`. Shard it last: it prefetches itself."
        )
