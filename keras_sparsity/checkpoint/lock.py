"""A folder of checkpoints: of all ranks, and of one training at a time."""

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time

from keras_sparsity.checkpoint import folder, storage

FILE = ".lock"
# A job that was just killed may be ending. Less than the shortest timeout of
# ranks that wait for this one.
_PATIENCE_SECONDS = 3.0
_HELD = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
# Locks of a process, below, do not keep it out itself.
_held_here = set()


@contextlib.contextmanager
def held(directory, communicator):
    """Holds the folder, made if missing, while it is entered.

    Raises:
        OSError: on every rank, if another training holds it.
    """
    with contextlib.ExitStack() as stack:

        def take():
            if communicator.rank == 0:
                os.makedirs(directory, exist_ok=True)
                stack.enter_context(locked(directory))

        _together(directory, communicator, take)
        yield


def check_is_shared(directory, communicator):
    """Raises, on every rank, if one cannot write, or sees another folder."""
    name = f".probe-{communicator.rank}"
    probe = os.path.join(directory, name)

    def write():
        os.makedirs(directory, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            os.remove(probe)
        with open(probe, "x"):  # not the target of a link
            return name

    def find():
        if not set(probes) <= set(os.listdir(directory)):
            raise OSError(
                "what other ranks write there is not seen here; use a "
                "folder that all machines share"
            )

    try:
        probes = _together(directory, communicator, write)
        # Which ends when all ranks have looked.
        _together(directory, communicator, find)
    finally:
        with contextlib.suppress(OSError):
            os.remove(probe)


def _together(directory, communicator, attempt):
    what = f"use the directory {directory} for checkpoints"
    return storage.on_all_ranks(communicator, what, attempt)


@contextlib.contextmanager
def locked(directory):
    """Holds a folder's lock while it is entered.

    It is the process's (`fcntl.lockf`): the kernel releases it when the
    process ends, however it does, and a child that outlives it has no part in
    it.

    Raises:
        OSError: if another training holds it.
    """
    path = os.path.join(directory, FILE)
    with contextlib.ExitStack() as stack:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            # Not after opening: closing that would give up the lock.
            if any(_is_at(path, held) for held in _held_here):
                raise _taken(f"another `fit` of this process, {os.getpid()},")
            file = stack.enter_context(
                folder.opened(path, os.O_RDWR | os.O_CREAT, "r+b")
            )
            identity = _identity(os.fstat(file.fileno()))
            _lock(file, directory, deadline)
            if _is_at(path, identity):
                break
            file.close()  # a training that has ended took it away meanwhile
        _held_here.add(identity)
        stack.callback(_held_here.discard, identity)
        # Before it is closed, and so still held.
        stack.callback(_remove, path, identity)
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        holder = f"process {os.getpid()} on {socket.gethostname()} since"
        file.truncate()
        file.write(f"{holder} {since}".encode())
        file.flush()
        yield


def _lock(file, directory, deadline):
    while True:
        try:
            return fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return logging.getLogger(__name__).warning(
                    "The file system of %s has no locks: a second training "
                    "that writes its checkpoints there would not be noticed.",
                    directory,
                )
            if error.errno not in _HELD:
                raise
        if time.monotonic() > deadline:
            holder = file.read(200).decode(errors="replace")
            raise _taken(f"another one, {holder!r},")
        time.sleep(0.1)


def _identity(status):
    return status.st_dev, status.st_ino


def _is_at(path, identity):
    try:
        return _identity(os.lstat(path)) == identity
    except FileNotFoundError:
        return False


def _remove(path, identity):
    with contextlib.suppress(OSError):
        if _is_at(path, identity):
            os.remove(path)


def _taken(holder):
    return BlockingIOError(
        errno.EAGAIN,
        f"{holder} is training and writes its checkpoints there. Two would "
        "overwrite each other's: use a directory for each training, or wait "
        "until the other one has ended",
    )
