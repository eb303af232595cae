"""Variables' values from the files of a checkpoint."""

import contextlib
import functools
import itertools
import os
import reprlib

import keras
import numpy as np

from keras_sparsity.checkpoint import folder, state
from keras_sparsity.data.batches import split_batch
from keras_sparsity.global_batch import random_states
from keras_sparsity.global_batch.metrics import aggregation


def check_same_variables(entries, records, path, contents):
    """Raises ValueError unless `Entry`s are those of an index.

    Args:
        entries: list of `Entry`.
        records: what the index says of each.
        path, contents: the checkpoint's folder and index.
    """
    differing = [
        f"  {number}: the model has {_spell_entry(entry)}, the checkpoint "
        f"{_spell_record(record)}"
        for number, (entry, record) in enumerate(
            itertools.zip_longest(entries, records)
        )
        if not _are_alike(entry, record)
    ]
    if differing:
        raise ValueError(
            f"The checkpoint {path} was saved from another model or "
            f"optimizer: {len(differing)} variables differ. Build and compile "
            "the model as it was, or train in another directory."
            f"{_other_keras(contents)} The first of them:\n"
            + "\n".join(differing[:5])
        )


def _other_keras(contents):
    """A sentence where another version of Keras has saved a checkpoint."""
    versions = contents.get("versions")
    saved = versions.get("keras") if isinstance(versions, dict) else None
    if saved in (None, keras.__version__):
        return ""
    return (
        f" It was saved under Keras {reprlib.repr(saved)}, and this is "
        f"{keras.__version__}: versions may have an optimizer's variables in "
        "another order."
    )


def _are_alike(entry, record):
    if entry is None or record is None:
        return False
    # The state of a rank's part of a batch has that part's size.
    return (
        entry.section == record["section"]
        and entry.dtype == record["dtype"]
        and (
            record.get("each_rank", False)
            or list(entry.shape) == record["shape"]
        )
    )


def _spell_entry(entry):
    if entry is None:
        return "none"
    return str((entry.name, entry.section, entry.shape, entry.dtype))


def _spell_record(record):
    if record is None:
        return "none"
    shape = tuple(record["shape"])
    return str((record["name"], record["section"], shape, record["dtype"]))


def read(entries, numbered, path, contents, communicator):
    """Gives variables their values from the files of a checkpoint.

    Args:
        entries: list of `Entry`.
        numbered: of each, its number in the checkpoint and what the index
            says of it.
        path, contents: the checkpoint's folder and index.
    """
    with contextlib.ExitStack() as stack:

        @functools.cache
        def file(name):
            source = state.Source(os.path.join(path, name))
            return stack.enter_context(source)

        for entry, (number, record) in zip(entries, numbered, strict=True):
            restore(
                *(entry, number, record, file),
                *(contents["num_processes"], communicator),
            )


def restore(entry, number, record, file, num_processes, communicator):
    """Gives a variable its value, or this rank's rows of it.

    Args:
        entry: `Entry` of the variable.
        number: its number in the checkpoint.
        record: what the index says of it.
        file: function of a file's name that gives its `Source`.
        num_processes: the number of those that saved it.
    """
    if not entry.pieces:
        return  # other ranks have it
    names = [str(number)]
    if "num_partitions" in record or entry.layout is not None:
        _restore_rows(entry, names, record, file, communicator.rank)
        return
    holders = entry.ranks or tuple(range(communicator.size))
    saved_by = tuple(record.get("ranks") or range(num_processes))
    is_as_saved = saved_by == holders
    sources = _files(record, saved_by)
    if random_states.is_shared(entry.variable):
        sources, is_as_saved = sources[:1], True
    elif is_as_saved and len(sources) > 1:
        sources = [folder.rank_file(communicator.rank)]
    is_split = not is_as_saved and _is_split(entry, record)
    shape = tuple(entry.variable.shape)
    saved = [
        file(source).dataset(
            names, (None, *shape[1:]) if is_split else shape, entry.dtype
        )
        for source in sources
    ]
    if is_as_saved or not _is_own(entry, record):
        state.read(saved[0], entry.variable)
    else:
        place = holders.index(communicator.rank), len(holders)
        restore_own(entry, [dataset[()] for dataset in saved], *place)


def _files(record, saved_by):
    """The files that have a variable, one for each value of it.

    Args:
        record: what the index says of it.
        saved_by: the ranks that may have a value of their own.
    """
    if "ranks" in record or record.get("each_rank"):
        return [folder.rank_file(rank) for rank in saved_by]
    return [folder.DENSE]


def _is_own(entry, record):
    """Whether each rank has its own value, even if they were all equal."""
    return (
        record.get("each_rank", False)
        or entry.section == "metrics"
        or random_states.is_own(entry.variable)
    )


def _is_split(entry, record):
    """Whether each rank has its own rows, of the examples of its part."""
    return (
        record.get("each_rank", False)
        and entry.section != "metrics"
        and not random_states.is_own(entry.variable)
        and bool(entry.shape)
    )


def _restore_rows(entry, names, record, file, rank):
    """Rows from any partitions to those that this rank owns now."""
    count = record.get("num_partitions", 1)
    owners = record.get("owners")
    new_count = entry.layout.num_partitions if entry.layout else 1
    for partition, variable, _ in entry.parts(rank):
        for source in range(count):
            where, within = _files(record, record.get("ranks"))[0], names
            if owners is not None:
                where = folder.rank_file(owners[source % len(owners)])
                within = [*names, str(source)]
            num_rows = len(range(source, entry.shape[0], count))
            dataset = file(where).dataset(
                within, (num_rows, *entry.shape[1:]), entry.dtype
            )
            state.read_rows(
                dataset,
                (source, count),
                variable,
                (partition, new_count),
                entry.shape[0],
            )


def restore_own(entry, values, place, num_holders):
    """State of which each rank had its own, for another number of ranks.

    Args:
        entry: `Entry` of the variable.
        values: list of the saved values.
        place: this rank's place among the ranks that have it now.
        num_holders: their number.
    """
    variable = entry.variable
    if random_states.is_own(variable):
        variable.assign(values[0])
        random_states.fold_rank(variable, place)
    elif entry.section == "metrics":
        # They are summed (or averaged) over the ranks when they are read.
        total = sum(values[1:], values[0])
        kind = aggregation(variable)
        if kind == "mean":
            variable.assign(total / len(values))
        elif kind == "sum":
            has_total = place == 0 or entry.is_replicated
            variable.assign(total if has_total else np.zeros_like(total))
        else:
            variable.assign(values[0])
    else:
        # One row for each example of the rank's part of the batch, as the
        # states of a stateful layer: cut as batches are.
        part = None
        if entry.shape:
            part = split_batch(np.concatenate(values), place, num_holders)
        if part is None or part.shape != tuple(variable.shape):
            raise ValueError(
                f"{entry.name} had a value of its own on each of the "
                f"{len(values)} processes that saved it, of shape "
                f"{values[0].shape}, which cannot be split over "
                f"{num_holders}. Resume on {len(values)} processes."
            )
        variable.assign(part)
