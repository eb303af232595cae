"""Saving and restoring a model's whole state, on all ranks together."""

import collections
import functools
import hashlib
import logging
import os
import platform
import shutil
import traceback

import keras
import tensorflow as tf

from keras_sparsity._tf import checks, keras_models
from keras_sparsity._version import __version__
from keras_sparsity.checkpoint import folder, index, restoring, state
from keras_sparsity.checkpoint.written_file import written
from keras_sparsity.global_batch import random_states


class RanksLost(Exception):
    """Some ranks were lost meanwhile: those that are left can save anew."""


def save(model, directory, position, communicator, keep, is_doubtful=False):
    """Writes a checkpoint; every rank calls it.

    Args:
        model: a model compiled inside `strategy.scope()`, with its optimizer
            built.
        directory: folder of checkpoints, the same for all ranks.
        position: dict of values that `index.plain` accepts; `epoch` and `step`
            name the checkpoint.
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
        RanksLost: on every rank that is left, if nothing was written because
            others were lost.
    """
    name = folder.name_of(position["epoch"], position["step"])
    path = folder.partial(directory, name)
    together = functools.partial(
        on_all_ranks, communicator, f"write the checkpoint {name}"
    )
    rank, entries = communicator.rank, state.entries(model)

    def all_results(attempt):
        results = together(attempt)
        if len(results) < communicator.size:
            raise RanksLost
        return results

    try:
        begun = all_results(
            lambda: _begun(directory, position, entries, rank, is_doubtful)
        )
        spoiled = next((weight for weight, _ in begun if weight), None)
        if spoiled:
            shutil.rmtree(path, ignore_errors=True)
            return spoiled
        differing = _differing(entries, communicator)
        sealed = all_results(
            lambda: _write_files(path, entries, differing, communicator)
        )

        def commit():
            if rank == 0:
                facts = begun[0][1], sealed, entries, differing, communicator
                index.write(path, _contents(*facts))
                folder.commit(directory, name, keep)
            return rank == 0

        if not any(together(commit)):
            raise RanksLost
    except BaseException:
        if rank == 0:
            shutil.rmtree(path, ignore_errors=True)
        raise


def say_spoiled(weight, loss, directory, latest):
    """Warns that nothing is written; `latest` is an epoch and step, or None."""
    logging.getLogger(__name__).warning(
        "ShardedCheckpoint writes nothing while weights have NaN or "
        "infinity, and '%s' has; the loss is %s. The latest checkpoint in "
        "%s stays the one to go on from: %s. To end such a training, use "
        "`keras.callbacks.TerminateOnNaN`.",
        weight,
        checks.spell(loss),
        directory,
        folder.name_of(*latest) if latest else "none so far",
    )


def _begun(directory, position, entries, rank, is_doubtful):
    """A spoiled weight or None, and of the first rank the plain position."""
    spoiled = state.spoiled(entries, rank, is_doubtful)
    if rank != 0:
        return spoiled, None
    plain = {key: index.plain(v, key) for key, v in position.items()}
    if not spoiled:
        name = folder.name_of(position["epoch"], position["step"])
        folder.begin(directory, name)
    return spoiled, plain


def _contents(position, sealed, entries, differing, communicator):
    """The index: `sealed` has, for each rank, the facts of its files."""
    return {
        "versions": {
            "keras_sparsity": __version__,
            "keras": keras.__version__,
            "tensorflow": tf.__version__,
            "python": platform.python_version(),
        },
        "num_processes": communicator.size,
        "position": position,
        "variables": _records(entries, differing, communicator),
        "files": {k: v for of_rank in sealed for k, v in of_rank.items()},
    }


def on_all_ranks(communicator, what, attempt):
    """Does something that may fail on some ranks; then it fails on all.

    Returns:
        List of the results of `attempt()`, by rank, without those of ranks
        that were lost meanwhile.

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
        (communicator.rank, result, told), name="checkpoint/outcomes"
    )
    failures = [(rank, *told) for rank, _, told in outcomes if told]
    if not failures:
        return [result for _, result, _ in outcomes]
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
        is_resumed: whether a training is to go on from it.

    Raises:
        ValueError: on every rank, if a file of it is damaged. Says which
            checkpoint is the previous one.
        RuntimeError: on every rank that is left, if rank 0 was lost meanwhile.
    """
    found = None
    if communicator.rank == 0:
        found = _looked_up(directory, is_resumed)
    found = communicator.gather_objects(found, name="checkpoint/latest")[0]
    if found is None:
        raise RuntimeError(
            f"The rank that looked for a checkpoint in {directory} was lost "
            "meanwhile. Start the training again."
        )
    names, contents, problem = found
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


def _looked_up(directory, is_resumed):
    """Names of the checkpoints; the last one's index, or what is wrong."""
    names = folder.complete(directory)
    try:
        if not names:
            return names, None, None
        last = os.path.join(directory, names[-1])
        return names, index.read(last, is_resumed), None
    except ValueError as error:
        return names, None, str(error)


def restore(model, path, contents, communicator, sections, waiting=()):
    """Gives a model, its optimizer and metrics their state; on every rank.

    The number of processes and of partitions may be others than those that
    saved it.

    Args:
        model: a model, with its optimizer built if that is to be restored.
        path, contents: result of `latest`.
        sections: those to restore, of `Entry.section`. `"prediction"` is
            left as it is where the model or the checkpoint has none: another
            schedule has saved it.
        waiting: numbers of the holders of metrics to leave as they are.

    Raises:
        ValueError: if the model has other variables, or a file holds other
            data than its index says.
    """
    entries = state.entries(model)
    numbered = [*enumerate(contents["variables"])]
    have = {entry.section for entry in entries}
    if not have & {"prediction"} & {r["section"] for _, r in numbered}:
        sections = set(sections) - {"prediction"}
    entries = [
        entry
        for entry in entries
        if entry.section in sections and entry.holder not in waiting
    ]
    numbered = [
        (number, record)
        for number, record in numbered
        if record["section"] in sections and record.get("holder") not in waiting
    ]

    def read():
        restoring.read(entries, numbered, path, contents, communicator)
        if "model" in sections:
            for layer in keras_models.all_layers(model):
                if isinstance(layer, keras.layers.Normalization):
                    layer.finalize_state()  # It computes with constants.

    records = [record for _, record in numbered]
    restoring.check_same_variables(entries, records, path, contents)
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
        return communicator.rank, text

    what = f"read the checkpoint {path}"
    return dict(on_all_ranks(communicator, what, read))[communicator.rank]


def _write_files(path, entries, differing, communicator):
    """Writes this rank's files; returns their sizes and checksums."""
    rank, shared = communicator.rank, []
    names = [folder.rank_file(rank)]
    with written(os.path.join(path, names[0])) as file:
        file.attrs["host_random_states"] = random_states.host_states()
        for number, entry in enumerate(entries):
            if entry.layout is not None:
                group = file.create_group(str(number))
                for partition, piece, num_rows in entry.parts(rank):
                    state.write(group, str(partition), piece, num_rows)
                continue
            writers = _writers(entry, number in differing, communicator.size)
            if not writers:
                shared.append((number, entry))
            elif rank in writers:
                state.write(file, str(number), entry.variable)
    if rank == 0:
        names.append(folder.DENSE)
        with written(os.path.join(path, folder.DENSE)) as file:
            for number, entry in shared:
                state.write(file, str(number), entry.variable)
    return {name: folder.seal(os.path.join(path, name)) for name in names}


def _writers(entry, is_own, size):
    """The ranks whose files have a variable; none if the shared file has it.

    Args:
        entry: `Entry` that is no partitions.
        is_own: whether each rank that has it has its own value.
    """
    if entry.ranks is None:
        return tuple(range(size)) if is_own else ()
    return entry.ranks if is_own else entry.ranks[:1]


def _differing(entries, communicator):
    """Numbers of the variables of which each rank has its own."""
    if communicator.size == 1:
        return set()
    own = {
        number
        for number, entry in enumerate(entries)
        if entry.section == "metrics" and not entry.is_replicated
    }
    mine = {
        number: hashlib.blake2b(
            keras.ops.convert_to_numpy(entry.variable).tobytes(),
            digest_size=16,
        ).digest()
        for number, entry in enumerate(entries)
        if not entry.is_replicated and number not in own and entry.pieces
    }
    all_ranks = communicator.gather_objects(mine, name="checkpoint/digests")
    values = collections.defaultdict(set)
    for digests in all_ranks:
        for number, digest in digests.items():
            values[number].add(digest)
    return own | {number for number, each in values.items() if len(each) > 1}


def _records(entries, differing, communicator):
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
        if number in differing:
            record["each_rank"] = True
        if entry.holder is not None:
            record["holder"] = entry.holder
        if entry.ranks is not None:
            record["ranks"] = list(
                _writers(entry, number in differing, communicator.size)
            )
        records.append(record)
    return records
