"""A folder of checkpoints: complete ones, with an index and checksums.

    directory/
      epoch-00002-step-0000030/
        index.json       the file of each variable; written last
        dense.h5         state that is the same on all ranks, once
        rank-00000.h5    rank 0's partitions and its own state
        rank-00001.h5

A checkpoint is written under a name that begins with a dot, and renamed when
all its files are on disk: whatever has a name is complete.
"""

import contextlib
import hashlib
import os
import re
import shutil
import stat

DENSE = "dense.h5"
_NAME = re.compile(r"epoch-(\d+)-step-(\d+)")
_CHUNK_BYTES = 1 << 20


def rank_file(rank):
    return f"rank-{rank:05d}.h5"


def files(num_processes):
    """Names of the files of a checkpoint, but for its index."""
    return [DENSE, *map(rank_file, range(num_processes))]


def opened(path, flags=os.O_RDONLY, mode="rb"):
    """An open file of a checkpoint's folder: a file of that folder itself.

    Not what a link points to, and nothing that is read without an end.
    """
    try:
        descriptor = os.open(
            path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )
    except OSError as error:
        if os.path.islink(path):
            raise OSError(f"{path} is a symbolic link") from error
        raise
    file = os.fdopen(descriptor, mode)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(f"{path} is not a regular file")
    return file


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
    """Makes an empty folder to write in; removes leftovers of kills."""
    for other in os.listdir(directory):
        if other.startswith(".epoch-") and ".partial" in other:
            shutil.rmtree(os.path.join(directory, other), ignore_errors=True)
    os.mkdir(partial(directory, name))


def commit(directory, name, keep):
    """Gives a checkpoint its name, when all is written; removes old ones."""
    path = partial(directory, name)
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


def seal(path):
    """Has a file on disk; returns its size and checksum."""
    with opened(path) as file:
        os.fsync(file.fileno())
        return {
            "bytes": os.fstat(file.fileno()).st_size,
            "checksum": _checksum(file),
        }


def damage(path, sealed):
    """What is wrong with a file; None if it is what `seal` has seen."""
    try:
        with opened(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != sealed["bytes"]:
                return f"{path} has {size} bytes in place of {sealed['bytes']}"
            if _checksum(file) != sealed["checksum"]:
                return f"{path} is damaged: its checksum is wrong"
    except OSError as error:
        return f"{path} cannot be read: {error}"
    return None


def _checksum(file):
    digest = hashlib.blake2b(digest_size=16)
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _discard(directory, name):
    """Removes a checkpoint; one that a kill leaves half has no name."""
    hidden = partial(directory, name)
    with contextlib.suppress(OSError):
        os.rename(os.path.join(directory, name), hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _sync_folder(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
