"""Random streams: those that ranks share, and those they have apart."""

import json
import random

import keras
import numpy as np


def is_own(variable):
    """Whether a variable is the random state of a layer, such as dropout.

    Not that of one whose draws all ranks must share.
    """
    return variable.name == "seed_generator_state" and not getattr(
        variable, "is_same_on_all_ranks", False
    )


def fold_rank(state, rank):
    """Gives each rank a random stream of its own, derived from rank 0's."""
    seed, counter = keras.ops.convert_to_numpy(state)
    mixed = np.random.SeedSequence([int(seed), rank]).generate_state(1)[0]
    if rank:
        state.assign(np.array([mixed, counter], dtype="uint32"))


def host_states():
    """Python's and NumPy's random states, as text."""
    kind, keys, *rest = np.random.get_state()
    return json.dumps([random.getstate(), [kind, keys.tolist(), *rest]])


def set_host_states(text):
    """Takes back what `host_states` gave."""
    (version, internal, gauss), numpy_state = json.loads(text)
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(numpy_state))
