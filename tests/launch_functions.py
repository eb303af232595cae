"""Functions that the launcher's tests run in other processes."""

import ctypes
import os
import pathlib
import random
import resource
import signal
import sys
import threading
import time

from keras_sparsity import collectives


def describe(*args, **kwargs):
    """Where it runs, and what it was given."""
    ranks = collectives.current()
    print(f"output of rank {ranks.rank}")
    print(f"errors of rank {ranks.rank}", file=sys.stderr)
    return {
        "rank": ranks.rank,
        "size": ranks.size,
        "engine": ranks.engine,
        "local": (ranks.local_rank, ranks.local_size),
        "cross": (ranks.cross_rank, ranks.cross_size),
        "args": args,
        "kwargs": kwargs,
        "variable": os.environ.get("MINE"),
        "threads": os.environ["TF_NUM_INTRAOP_THREADS"],
        "random": random.random(),
        "hash": hash("a set's order"),
        "process": os.getpid(),
    }


def fail(rank):
    """Raises on one rank; the others wait for it."""
    if collectives.current().rank == rank:
        raise ValueError(f"no luck on rank {rank}")
    collectives.current().barrier("test/fail")


def fail_everywhere():
    raise ValueError(f"no luck on rank {collectives.current().rank}")


def die(rank):
    """Is killed on one rank."""
    if collectives.current().rank == rank:
        print("these are my last words", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    collectives.current().barrier("test/die")


def crash(rank, frames=70):
    """One rank crashes in a thread, while its main thread is deep in calls."""
    if frames:
        return crash(rank, frames - 1)
    if collectives.current().rank == rank:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no file of it
        threading.Thread(target=_read_nothing).start()
    collectives.current().barrier("test/crash")


def _read_nothing():
    ctypes.string_at(0)


def fail_or_die(rank):
    """Is killed on one rank, and raises on the others."""
    if collectives.current().rank != rank:
        raise ValueError(f"no luck on rank {collectives.current().rank}")
    print("these are my last words", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)


def hang(rank):
    """Never ends on one rank."""
    if collectives.current().rank == rank:
        print("hanging", file=sys.stderr)
        time.sleep(600)


def double(values):
    return 2 * values


def is_running(pid):
    """Whether a process has not ended."""
    # An orphan may stay as a zombie where no init process waits for it.
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


_SSH = """\
#!/bin/sh
host=$1
shift
case $host in
down)
    echo "ssh: connect to host down: Connection refused" >&2
    exit 255 ;;
old)
    read -r greeting
    echo "Welcome to this host."
    echo '{"versions": {"python": "3.9.1"}, "has_script": false}'
    exit 0 ;;
esac
exec env -i HOME="$HOME" PATH="$PATH" sh -c "$*"
"""


def ssh_client(folder):
    """The path of a stand-in for the ssh client, which runs the command here.

    As behind a real one there is nothing of our environment. This machine has
    names that are not taken for it: 127.0.0.2, 127.0.0.3, ...
    """
    path = pathlib.Path(folder, "ssh")
    path.write_text(_SSH)
    path.chmod(0o755)
    return str(path)
