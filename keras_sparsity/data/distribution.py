"""Each rank's part of the input.

What `fit` is given is the global batch; rank r of n trains on the rows
`[r * B // n, (r + 1) * B // n)` of each batch of B, which may be none. That
asks for the same batches on all ranks. Each rank therefore notes a
fingerprint of every global batch as it passes, and the ranks compare them
from time to time.
"""

import typing

import tensorflow as tf

from keras_sparsity._tf import contexts, keras_input
from keras_sparsity.data.batches import mapped, split_batch
from keras_sparsity.data.equal_steps import (
    ending_together,
    with_equal_steps,
)
from keras_sparsity.data.fingerprints import Fingerprints, fingerprint
from keras_sparsity.data.marks import (
    agrees_in_step,
    check_is_dataset,
    check_nothing_reads_ahead,
    is_sharded,
    mark_as_part,
)
from keras_sparsity.data.of_servers import agreed_number, parts_of_server
from keras_sparsity.data.stand_ins import counted_part, with_stand_ins

SAME_DATASET = (
    "Give every rank the same dataset: each trains on its own part of every "
    "batch. Seed its shuffles and generators alike on every rank. What is "
    "each rank's own part already, only `strategy.shard(dataset)` can make."
)

# The last `_Input` is that of the epoch iterator that is being made. None:
# datasets are left as they are.
_inputs = []


class _Input(typing.NamedTuple):
    """What one of Keras's epoch iterators reads; as `for_steps` takes it."""

    num_epochs: int
    epoch_input: keras_input.EpochInput
    are_counted: bool


def distribute(dataset, collectives):
    """A replica's part of a dataset of global batches, or of a `shard`.

    Returns:
        `tf.data.Dataset` of this rank's parts, which `fit` and `distribute`
        take as they are. A dedicated server's is not read: its parts are
        stand-ins, as many as the workers have parts.

    Raises:
        ValueError: if the ranks' datasets have different structures or
            numbers of batches.
    """
    if _is_undivided():
        return dataset
    dataset = _read(dataset)
    if collectives.size == 1:
        return dataset
    check_is_dataset(dataset)
    if is_sharded(dataset):
        check_nothing_reads_ahead(dataset)
        if not _are_counted():
            return dataset
        return with_stand_ins(_ending_alike(dataset, collectives))
    parts = _parts_of(dataset, collectives)
    return parts if _are_counted() else mark_as_part(parts)


def _parts_of(dataset, collectives):
    """A replica's part of a dataset of global batches, as `distribute`."""
    known = _inputs[-1].epoch_input.num_batches if _inputs else None
    number = agreed_number(dataset, SAME_DATASET, collectives, known)
    if collectives.is_server:
        return parts_of_server(dataset, number, collectives, _are_counted())
    parts = split_batches(
        dataset,
        collectives.rank,
        collectives.num_workers,
        Fingerprints(collectives),
    )
    if collectives.num_servers and number == tf.data.UNKNOWN_CARDINALITY:
        return ending_together(parts, collectives)
    return parts


def _ending_alike(part, collectives):
    """A part, of as many steps on all ranks.

    Steps of a pipeline behind `shard` (filters, other batches) change the
    number of its batches, and workers' own datasets may differ in it.
    """
    if collectives.num_servers or agrees_in_step(part):
        return part
    name = "input/number_of_parts"
    numbers = collectives.gather_objects(int(part.cardinality()), name)
    is_known = min(numbers) != tf.data.UNKNOWN_CARDINALITY
    if is_known and len(set(numbers)) == 1:
        return part
    number = max(numbers) if min(numbers) >= 0 else min(numbers)
    return with_equal_steps(part, number, collectives)


def repeat_on_all(dataset, collectives):
    """A dataset whose batches every process reads whole.

    `check_inputs` compares them.

    Raises:
        ValueError: if the dataset is a part, or as `distribute`.
    """
    if _is_undivided():
        return dataset
    dataset = _read(dataset)
    if collectives.size == 1:
        return dataset
    check_is_dataset(dataset)
    if is_sharded(dataset):
        raise ValueError(
            "Every process of a model in stages reads whole batches: the "
            "first stage the inputs, the last one the labels. Received: a "
            "part of a dataset, from `shard`. Give the dataset itself."
        )
    check_is_alike(dataset, collectives)
    return split_batches(dataset, 0, 1, Fingerprints(collectives))


def read_alike(dataset, fingerprints, collectives):
    """A dataset whose whole batches every worker reads, in the same order.

    Args:
        fingerprints: `Fingerprints` that note every batch.

    Raises:
        ValueError: as `distribute`.
    """
    check_is_alike(dataset, collectives)
    if collectives.num_workers == 1:
        return dataset
    return _mapped_alike(dataset, lambda batch: batch, fingerprints)


def check_is_alike(dataset, collectives):
    """Raises ValueError unless the ranks' datasets have one structure."""
    agreed_number(dataset, SAME_DATASET, collectives)


def for_steps(num_epochs, epoch_input, are_counted=True):
    """While entered, datasets are those of one of Keras's epoch iterators.

    `distribute` gives `Counted` parts, as steps take them. A custom loop gets
    parts as they are, which may have no examples.

    Args:
        num_epochs: of a `fit`, at most.
        epoch_input: the `EpochInput`.
        are_counted: False where `repeat_on_all` reads whole batches.
    """
    return contexts.on_top(
        _inputs, _Input(num_epochs, epoch_input, are_counted)
    )


def undivided():
    """While entered, a strategy leaves datasets as they are.

    For a model that no strategy has adopted: its class would not bring the
    ranks' parts together.
    """
    return contexts.on_top(_inputs, None)


def _is_undivided():
    return bool(_inputs) and _inputs[-1] is None


def _are_counted():
    return bool(_inputs) and not _is_undivided() and _inputs[-1].are_counted


def _read(dataset):
    if not _inputs:
        return dataset
    last = _inputs[-1]
    return last.epoch_input.read(dataset, last.num_epochs)


def split_batches(dataset, rank, size, fingerprints=None):
    """This rank's rows of every batch.

    Args:
        dataset: `tf.data.Dataset` of batches of any structure: tuples, dicts,
            dense, ragged and sparse tensors, None.
        rank, size: which part, and the number of parts.
        fingerprints: `Fingerprints` that note every whole batch, or None.

    Returns:
        `tf.data.Dataset` of as many batches, whose batch axis is None.

    Example:

    >>> batches = tf.data.Dataset.range(6).batch(4)
    >>> [part.numpy().tolist() for part in split_batches(batches, 0, 2)]
    [[0, 1], [4]]
    """
    check_is_dataset(dataset)
    check_is_batched(dataset)
    cut = counted_part if _are_counted() else split_batch
    return _mapped_alike(
        dataset, lambda batch: cut(batch, rank, size), fingerprints
    )


def _mapped_alike(dataset, function, fingerprints):
    """Maps a function, in the same order on all ranks.

    Args:
        fingerprints: as for `split_batches`.
    """
    # Keras turns tuning off where Python workers fill the pipeline: threads
    # that read ahead would ask them for batches after the epoch's end.
    is_tuned = dataset.options().autotune.enabled is not False
    parallel = {
        "num_parallel_calls": tf.data.AUTOTUNE if is_tuned else None,
        "deterministic": True if is_tuned else None,
    }

    def noted(batch):
        part = function(batch)
        return part if fingerprints is None else (part, fingerprint(batch))

    parts = mapped(dataset, noted, **parallel)
    if fingerprints is not None:
        parts = fingerprints.note(parts)
    options = tf.data.Options()
    options.deterministic = True
    parts = parts.with_options(options)
    return parts.prefetch(tf.data.AUTOTUNE) if is_tuned else parts


def own_parts(dataset, collectives):
    """Has a strategy take each worker's dataset for its parts, as it is."""
    check_is_dataset(dataset)
    if not collectives.num_servers:
        # `fit` takes as many steps as a dataset is known to have.
        name = "input/number_of_own"
        numbers = collectives.gather_objects(int(dataset.cardinality()), name)
        if min(numbers) >= 0 and len(set(numbers)) > 1:
            dataset = with_equal_steps(dataset, max(numbers), collectives)
        return mark_as_part(dataset, reordered_by="worker")
    (number,) = collectives.broadcast(
        [dataset.cardinality()], name="input/own_number"
    )
    if collectives.is_server:
        dataset = parts_of_server(dataset, int(number), collectives)
    elif number == tf.data.UNKNOWN_CARDINALITY:
        dataset = ending_together(dataset, collectives)
    return mark_as_part(dataset, reordered_by="worker")


def check_is_batched(dataset):
    """Raises ValueError for elements without a batch axis."""
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
