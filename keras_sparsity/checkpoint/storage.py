"""Saving and restoring a model's whole state, on all ranks together."""

import contextlib
import functools
import hashlib
import itertools
import os
import platform
import shutil
import traceback

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity._version import __version__
from keras_sparsity.checkpoint import folder, index, state
from keras_sparsity.data.batches import split_batch
from keras_sparsity.global_batch import random_states
from keras_sparsity.global_batch.metrics import aggregation


def save(model, directory, position, communicator, keep, is_doubtful=False):
    """Writes a checkpoint; every rank calls it.

    Args:
        model: a model compiled inside `strategy.scope()`, with its optimizer
            built.
        directory: folder of checkpoints, the same for all ranks.
        position: dict of values that `index.plain` accepts; `epoch` and `step`
            name the checkpoint.
        communicator: the `Collectives` of all ranks.
        keep: how many of the latest checkpoints to leave.
        is_doubtful: whether the loss was not finite, so that infinite
            weights, too, are no state to go on from.

    Returns:
        None; or, where nothing was written because it was spoiled, the name
        of a weight with NaN or infinity.

    Raises:
        OSError: on every rank, if any rank cannot write. Earlier complete
            checkpoints stay.
        ValueError: on every rank, if `position` has a value that JSON cannot
            hold.
    """
    name = folder.name_of(position["epoch"], position["step"])
    path = folder.partial(directory, name)
    together = functools.partial(
        on_all_ranks, communicator, f"write the checkpoint {name}"
    )
    is_first = communicator.rank == 0
    entries = state.entries(model)

    def begin():
        spoiled = state.spoiled(entries, communicator.rank, is_doubtful)
        if not is_first:
            return spoiled, None
        plain = {key: index.plain(v, key) for key, v in position.items()}
        if not spoiled:
            folder.begin(directory, name)
        return spoiled, plain

    try:
        begun = together(begin)
        spoiled = next((weight for weight, _ in begun if weight), None)
        if spoiled:
            shutil.rmtree(path, ignore_errors=True)
            return spoiled
        differing = _differing(entries, communicator)
        sealed = together(
            lambda: _write_files(path, entries, differing, communicator.rank)
        )

        def commit():
            if is_first:
                contents = {
                    "versions": _versions(),
                    "num_processes": communicator.size,
                    "position": begun[0][1],
                    "variables": _records(entries, differing),
                    "files": {k: v for part in sealed for k, v in part.items()},
                }
                index.write(path, contents)
                folder.commit(directory, name, keep)

        together(commit)
    except BaseException:
        if is_first:
            shutil.rmtree(path, ignore_errors=True)
        raise


def on_all_ranks(communicator, what, attempt):
    """Does something that may fail on some ranks; then it fails on all.

    Returns:
        List of the results of `attempt()`, by rank.

    Raises:
        OSError: if it raised one on any rank.
        Exception: what `attempt` raised on this rank, if it is no `OSError`;
            on others a `ValueError`, `TypeError` or `RuntimeError` with it.
    """
    result = mine = told = None
    try:
        result = attempt()
    except Exception as raised:
        mine, told = raised, _told(raised)
    outcomes = communicator.gather_objects(
        (result, told), name="checkpoint/outcomes"
    )
    failures = [
        (rank, *told) for rank, (_, told) in enumerate(outcomes) if told
    ]
    if not failures:
        return [result for result, _ in outcomes]
    if mine is not None and not isinstance(mine, OSError):
        raise mine
    listed = "; ".join(f"rank {rank}: {text}" for rank, _, text, _ in failures)
    message = f"Could not {what}. {listed}."
    for rank, kind, _, trace in failures:
        if kind is not OSError:
            raise kind(f"{message}\n\nOn rank {rank}:\n{trace}") from mine
    raise OSError(message) from mine


def _told(error):
    """An error as other ranks receive it: kind, text, traceback."""
    for kind in (OSError, ValueError, TypeError, RuntimeError):
        if isinstance(error, kind):
            break
    text = f"{type(error).__name__}: {error}"
    return kind, text, "".join(traceback.format_exception(error))


def latest(directory, communicator, is_resumed=False):
    """Path and index of the latest checkpoint, found sound; None if none.

    Args:
        directory: folder of checkpoints.
        communicator: the `Collectives` of all ranks.
        is_resumed: whether a training is to go on from it.

    Raises:
        ValueError: on every rank, if a file of it is damaged. Says which
            checkpoint is the previous one.
    """
    names, contents, problem = [], None, None
    if communicator.rank == 0:
        names = folder.complete(directory)
        try:
            if names:
                last = os.path.join(directory, names[-1])
                contents = index.read(last, is_resumed)
        except ValueError as error:
            problem = str(error)
    names, contents, problem = communicator.gather_objects(
        (names, contents, problem), name="checkpoint/latest"
    )[0]
    if not names:
        return None
    path = os.path.join(directory, names[-1])
    if contents is not None:
        # Each rank looks at some of the files.
        sealed = contents["files"]
        mine = sorted(sealed)[communicator.rank :: communicator.size]
        damages = communicator.gather_objects(
            [
                folder.damage(os.path.join(path, file), sealed[file])
                for file in mine
            ],
            name="checkpoint/damages",
        )
        problem = "; ".join(each for part in damages for each in part if each)
    if problem:
        where = f"go on from {names[-2]}" if names[1:] else "start anew"
        raise ValueError(
            f"The latest checkpoint, {path}, cannot be read: {problem}. Move "
            f"it out of its folder to {where}."
        )
    return path, contents


def restore(model, path, contents, communicator, sections):
    """Gives a model, its optimizer and metrics their state; on every rank.

    The number of processes and of partitions may be others than those that
    saved it.

    Args:
        model: a model, with its optimizer built if that is to be restored.
        path, contents: result of `latest`.
        communicator: the `Collectives` of all ranks.
        sections: of `"model"`, `"optimizer"` and `"metrics"`, which to
            restore.

    Raises:
        ValueError: if the model has other variables, or a file holds other
            data than its index says.
    """
    entries = [e for e in state.entries(model) if e.section in sections]
    numbered = [
        (str(number), record)
        for number, record in enumerate(contents["variables"])
        if record["section"] in sections
    ]
    _check_same_variables(entries, [record for _, record in numbered], path)

    def read():
        with contextlib.ExitStack() as stack:

            @functools.cache
            def file(name):
                source = state.Source(os.path.join(path, name))
                return stack.enter_context(source)

            for entry, (number, record) in zip(entries, numbered, strict=True):
                _restore(entry, number, record, file, contents, communicator)

    on_all_ranks(communicator, f"read the checkpoint {path}", read)


def read_host_states(path, contents, communicator):
    """This rank's `random_states.host_states`; rank 0's, on another number.

    Raises:
        ValueError: if they are damaged.
    """

    def read():
        is_as_saved = contents["num_processes"] == communicator.size
        name = folder.rank_file(communicator.rank if is_as_saved else 0)
        with state.Source(os.path.join(path, name)) as file:
            text = file.text("host_random_states")
        random_states.parsed(text)
        return text

    what = f"read the checkpoint {path}"
    return on_all_ranks(communicator, what, read)[communicator.rank]


def _write_files(path, entries, differing, rank):
    """Writes this rank's files; returns their sizes and checksums."""
    names = [folder.rank_file(rank)]
    with state.open_file(os.path.join(path, names[0]), "w") as file:
        file.attrs["host_random_states"] = random_states.host_states()
        for number, entry in enumerate(entries):
            if entry.layout is not None:
                group = file.create_group(str(number))
                for partition, piece, num_rows in entry.parts(rank):
                    state.write(group, str(partition), piece, num_rows)
            elif number in differing:
                state.write(file, str(number), entry.variable)
    if rank == 0:
        names.append(folder.DENSE)
        with state.open_file(os.path.join(path, folder.DENSE), "w") as file:
            for number, entry in enumerate(entries):
                if entry.layout is None and number not in differing:
                    state.write(file, str(number), entry.variable)
    return {name: folder.seal(os.path.join(path, name)) for name in names}


def _differing(entries, communicator):
    """Numbers of the variables of which each rank has its own."""
    if communicator.size == 1:
        return set()
    own = {n for n, entry in enumerate(entries) if entry.section == "metrics"}
    mine = {
        number: hashlib.blake2b(
            keras.ops.convert_to_numpy(entry.variable).tobytes(),
            digest_size=16,
        ).digest()
        for number, entry in enumerate(entries)
        if not entry.is_replicated and number not in own
    }
    all_ranks = communicator.gather_objects(mine, name="checkpoint/digests")
    return own | {
        number
        for number in mine
        if len({digests[number] for digests in all_ranks}) > 1
    }


def _records(entries, differing):
    """The index's entry of each variable."""
    records = []
    for number, entry in enumerate(entries):
        record = {
            "section": entry.section,
            "name": entry.name,
            "shape": list(entry.shape),
            "dtype": entry.dtype,
        }
        if entry.layout is not None:
            record["num_partitions"] = entry.layout.num_partitions
            record["owners"] = list(entry.layout.owners)
        elif number in differing:
            record["each_rank"] = True
        records.append(record)
    return records


def _versions():
    return {
        "keras_sparsity": __version__,
        "keras": keras.__version__,
        "tensorflow": tf.__version__,
        "python": platform.python_version(),
    }


def _check_same_variables(entries, records, path):
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
            "the model as it was, or train in another directory. The first of "
            "them:\n" + "\n".join(differing[:5])
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


def _restore(entry, number, record, file, contents, communicator):
    rank = communicator.rank
    is_as_saved = contents["num_processes"] == communicator.size
    if "num_partitions" in record or entry.layout is not None:
        _restore_rows(entry, number, record, file, rank)
        return
    sources = [folder.DENSE]
    if record.get("each_rank"):
        count = contents["num_processes"]
        ranks = [rank] if is_as_saved else range(count)
        sources = [folder.rank_file(each) for each in ranks]
    is_split = not is_as_saved and _is_split(entry, record)
    shape = tuple(entry.variable.shape)
    saved = [
        file(source).dataset(
            [number], (None, *shape[1:]) if is_split else shape, entry.dtype
        )
        for source in sources
    ]
    if is_as_saved or not _is_own(entry, record):
        state.read(saved[0], entry.variable)
    else:
        _restore_own(entry, saved, communicator)


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


def _restore_rows(entry, number, record, file, rank):
    """Rows from any partitions to those that this rank owns now."""
    count = record.get("num_partitions", 1)
    owners = record.get("owners")
    new_count = entry.layout.num_partitions if entry.layout else 1
    for partition, variable, _ in entry.parts(rank):
        for source in range(count):
            names = [number] if owners is None else [number, str(source)]
            place = folder.DENSE
            if owners is not None:
                place = folder.rank_file(owners[source % len(owners)])
            num_rows = len(range(source, entry.shape[0], count))
            dataset = file(place).dataset(
                names, (num_rows, *entry.shape[1:]), entry.dtype
            )
            state.read_rows(
                dataset,
                (source, count),
                variable,
                (partition, new_count),
                entry.shape[0],
            )


def _restore_own(entry, saved, communicator):
    """State of which each rank had its own, for another number of ranks."""
    variable, rank = entry.variable, communicator.rank
    values = [dataset[()] for dataset in saved]
    if random_states.is_own(variable):
        variable.assign(values[0])
        random_states.fold_rank(variable, rank)
    elif entry.section == "metrics":
        # They are summed (or averaged) over the ranks when they are read.
        total = sum(values[1:], values[0])
        kind = aggregation(variable)
        if kind == "mean":
            variable.assign(total / len(values))
        elif kind == "sum":
            variable.assign(total if rank == 0 else np.zeros_like(total))
        else:
            variable.assign(values[0])
    else:
        # One row for each example of the rank's part of the batch, as the
        # states of a stateful layer: cut as batches are.
        part = split_batch(np.concatenate(values), rank, communicator.size)
        if part.shape != tuple(variable.shape):
            raise ValueError(
                f"{entry.name} had a value of its own on each of the "
                f"{len(values)} processes that saved it, of shape "
                f"{values[0].shape}, which cannot be split over "
                f"{communicator.size}. Resume on {len(values)} processes."
            )
        variable.assign(part)
