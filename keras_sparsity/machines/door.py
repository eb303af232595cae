"""A file by which a process that was started anew joins a run of others.

Its folder is the launcher's, and only its user reads it: it has the secret of
the connections of `health/channel.py`.
"""

import contextlib
import functools
import json
import os

# Path of the file, in an attempt of which ranks may be started anew.
DOOR_VARIABLE = "KERAS_SPARSITY_DOOR"
# Set in the process of a rank that was started anew.
JOINS_VARIABLE = "KERAS_SPARSITY_JOINS"


def is_wanted():
    """Whether the launcher starts lost ranks anew."""
    return bool(os.environ.get(DOOR_VARIABLE))


def open_for(facts):
    """Writes what a process must know that joins; the launcher then starts one.

    The facts are a dict of what JSON can hold.
    """
    path = os.environ[DOOR_VARIABLE]
    with contextlib.suppress(FileNotFoundError):
        os.remove(path + ".part")
    part = os.open(path + ".part", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(part, "w") as file:
        json.dump(facts, file)
    os.replace(path + ".part", path)


@functools.cache
def facts():
    """The facts for this process, if it is to join a run, else None."""
    if not os.environ.get(JOINS_VARIABLE):
        return None
    with open(os.environ[DOOR_VARIABLE]) as file:
        return json.load(file)
