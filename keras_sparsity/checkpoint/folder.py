"""A folder of checkpoints: complete ones, with an index and checksums.

    directory/
      epoch-00002-step-0000030/
        index.json       what is where; written last
        dense.h5         what is the same on all ranks, once
        rank-00000.h5    what rank 0 owns: its partitions, its own state
        rank-00001.h5

A checkpoint is written under a name that begins with a dot, and renamed when
all its files are on disk: whatever has a name is complete.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil

FORMAT = "keras_sparsity checkpoint"
# Of what is written. Every earlier one can be read (tests/data).
FORMAT_VERSION = 1
INDEX = "index.json"
DENSE = "dense.h5"
_NAME = re.compile(r"epoch-(\d+)-step-(\d+)")
_CHUNK_BYTES = 1 << 20


def rank_file(rank):
    return f"rank-{rank:05d}.h5"


def name_of(epoch, step):
    """A checkpoint's name: epochs begun (from 0), steps done in this one."""
    return f"epoch-{epoch:05d}-step-{step:07d}"


def complete(directory):
    """Names of the complete checkpoints of a directory, in order."""
    if not os.path.isdir(directory):
        return []
    found = [
        (tuple(map(int, match.groups())), match[0])
        for match in map(_NAME.fullmatch, os.listdir(directory))
        if match
    ]
    return [name for _, name in sorted(found)]


def partial(directory, name):
    """Path under which a checkpoint is written."""
    return os.path.join(directory, f".{name}.partial")


def begin(directory, name):
    """Makes an empty folder to write in; removes what kills have left."""
    for other in os.listdir(directory):
        if other.startswith(".epoch-") and other.endswith(".partial"):
            shutil.rmtree(os.path.join(directory, other), ignore_errors=True)
    os.mkdir(partial(directory, name))


def commit(directory, name, index, keep):
    """Writes the index, gives the checkpoint its name, removes old ones."""
    path = partial(directory, name)
    index = {"format": FORMAT, "format_version": FORMAT_VERSION, **index}
    index["checksum"] = _checksum_of_index(index)
    with open(os.path.join(path, INDEX), "w") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(path)
    target = os.path.join(directory, name)
    if os.path.isdir(target):  # of an earlier training, to the same position
        os.rename(target, f"{path}-old")
    os.rename(path, target)
    _sync_folder(directory)
    shutil.rmtree(f"{path}-old", ignore_errors=True)
    for old in complete(directory)[:-keep]:
        if old != name:
            _discard(directory, old)


def read_index(path):
    """The index of a checkpoint.

    Raises:
        ValueError: if it is damaged, or of a later version.
    """
    file = os.path.join(path, INDEX)
    try:
        with open(file) as opened:
            index = json.load(opened)
        checksum = index.pop("checksum")
        kind, version = index["format"], index["format_version"]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the index {file} cannot be read: {type(error).__name__}: {error}"
        ) from error
    if kind == FORMAT and version > FORMAT_VERSION:
        raise ValueError(
            f"its format is version {version}, and this version of "
            f"keras_sparsity reads up to {FORMAT_VERSION}: update it"
        )
    if kind != FORMAT or checksum != _checksum_of_index(index):
        raise ValueError(f"the index {file} is damaged: its checksum is wrong")
    return index


def seal(path):
    """Has a file on disk; returns its size and checksum."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.blake2b(digest_size=16)
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        return {"bytes": file.tell(), "checksum": digest.hexdigest()}


def damage(path, sealed):
    """What is wrong with a file; None if it is what `seal` has seen."""
    try:
        found = seal(path)
    except OSError as error:
        return f"{path} cannot be read: {error}"
    if found["bytes"] != sealed["bytes"]:
        return (
            f"{path} has {found['bytes']} bytes in place of {sealed['bytes']}"
        )
    if found["checksum"] != sealed["checksum"]:
        return f"{path} is damaged: its checksum is wrong"
    return None


def _discard(directory, name):
    """Removes a checkpoint; one that a kill leaves half has no name."""
    hidden = partial(directory, name)
    with contextlib.suppress(OSError):
        os.rename(os.path.join(directory, name), hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _checksum_of_index(index):
    text = json.dumps(index, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _sync_folder(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
