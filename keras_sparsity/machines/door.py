"""How a process that was started anew joins a run of others.

The rank that decides tells the launcher the facts (`health/launcher.py`), which
the launcher puts into the environment of the new process, as it does the facts
by which ranks reach the launcher. Both have the secret of connections of
`health/channel.py`.
"""

import functools
import json
import os

# Set where ranks may be lost: how to reach the launcher, and `restarts`.
LAUNCHER_VARIABLE = "KERAS_SPARSITY_LAUNCHER"
# Set in the process of a rank that was started anew: how it joins.
JOINS_VARIABLE = "KERAS_SPARSITY_JOINS"


def launcher():
    """The facts of the launcher that hears of lost ranks, else None."""
    return _given(LAUNCHER_VARIABLE)


def is_wanted():
    """Whether the launcher starts lost ranks anew."""
    return (launcher() or {}).get("restarts", False)


def facts():
    """The facts for this process, if it is to join a run, else None."""
    return _given(JOINS_VARIABLE)


@functools.cache
def _given(name):
    text = os.environ.get(name)
    return json.loads(text) if text else None
