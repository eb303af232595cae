"""Messages of the rank that decides to the launcher, on whatever machine."""

import functools
import logging

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
    to_launcher = _connected(rank)
    return to_launcher is not None and to_launcher.send(**message)


@functools.cache
def _connected(rank):
    facts = door.launcher()
    if facts is None:
        return None
    try:
        return channel.call(facts, rank, "The launcher", _CONNECT_SECONDS)
    except RuntimeError as error:
        logging.getLogger(__name__).warning(
            "The loss of a process will end the run, as the launcher will not "
            "hear that the others go on. %s",
            error,
        )
        return None
