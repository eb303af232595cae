"""Messages of the rank that decides to the launcher, on whatever machine."""

import functools

from keras_sparsity.health import channel
from keras_sparsity.machines import door

# Ranks wait meanwhile for the one that connects.
_CONNECT_SECONDS = 10.0


def tell(rank, **message):
    """Tells the launcher; False if none hears of lost ranks.

    Args:
        rank: This process's, which decides.
        message: See `launch/listener.py`.
    """
    to_launcher, _ = _connected(rank)
    return to_launcher is not None and to_launcher.send(**message)


def problem(rank):
    """Why the launcher hears nothing, in words; None if it does, or is none."""
    return _connected(rank)[1]


@functools.cache
def _connected(rank):
    """`(channel or None, problem or None)`."""
    facts = door.launcher()
    if facts is None:
        return None, None
    try:
        return channel.call(facts, rank, "The launcher", _CONNECT_SECONDS), None
    except RuntimeError as error:
        return None, str(error)
