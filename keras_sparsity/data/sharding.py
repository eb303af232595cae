"""Input that is split by rank before it is read or decoded."""

import logging

import tensorflow as tf

from keras_sparsity._tf import checks
from keras_sparsity.data.dataset_graph import CannotSplit, DatasetGraph
from keras_sparsity.data.distribution import (
    SAME_DATASET,
    check_is_batched,
    distribute,
)
from keras_sparsity.data.equal_steps import with_equal_steps
from keras_sparsity.data.marks import (
    check_is_dataset,
    is_sharded,
    mark_as_part,
)
from keras_sparsity.data.of_servers import agreed, parts_of_server

__all__ = ["shard"]

_told = set()  # reasons to split late, which would be told in each epoch


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

    Split by files, or by elements with a shuffle behind, a global batch holds
    other examples on another number of ranks: resume a training from within an
    epoch on as many.

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
    check_is_dataset(dataset)
    checks.processes("collectives", collectives)
    if is_sharded(dataset):
        return dataset
    check_is_batched(dataset)
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
    plan = agreed(plan, "The dataset to shard", SAME_DATASET, collectives)
    if plan["split by"] == "batches":
        _tell_of_late_split(plan.get("reason", reason), by, collectives)
        return distribute(dataset, collectives)
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


def _are_full(dataset):
    """Whether batches have one size: `batch(..., drop_remainder=True)`."""
    shapes = [
        getattr(spec, "shape", None)
        for spec in tf.nest.flatten(dataset.element_spec)
    ]
    return all(s is not None and s.rank and s[0] is not None for s in shapes)


def _split_early(dataset, graph, place, collectives):
    """This rank's part, split by files or elements."""
    part = number = reordered_by = None
    if place:
        reordered_by = None if place.keeps_batches else place.by
        part = graph.split(place, collectives.rank, collectives.num_workers)
        part = part.with_options(dataset.options())
        if place.by == "elements":
            # Each rank drops what it reads for others: all need one order.
            options = tf.data.Options()
            options.deterministic = True
            part = part.with_options(options)
        counted = dataset if place.keeps_batches else part
        number = int(counted.cardinality())
    numbers = collectives.gather_objects(number, name="input/num_steps")
    numbers = numbers[: collectives.num_workers]
    # As many as the worker with most has.
    num_steps = min(numbers) if min(numbers) < 0 else max(numbers)
    if part is None:
        part = parts_of_server(dataset, num_steps, collectives)
    else:
        are_full = place.keeps_batches and _are_full(dataset)
        part = with_equal_steps(part, num_steps, collectives, are_full)
    agrees_in_step = num_steps == tf.data.UNKNOWN_CARDINALITY
    return mark_as_part(part, dataset, agrees_in_step, reordered_by)
