"""Random streams: shared by all ranks, or each rank's own."""

import contextlib
import json
import random
import reprlib

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity._tf import contexts, patches, random_seeds

_drawing = []  # ranks by which random operations draw, the inmost last

# Keras's own seeds are below 933,199, so that no two ranks meet.
_BETWEEN_RANKS = 2**20


def is_own(variable):
    """Whether a variable is the random state of a layer, such as dropout.

    Layers whose draws all ranks must share have none of their own.
    """
    return is_state(variable) and not is_shared(variable)


def is_state(variable):
    """Whether a variable is the random state of a layer."""
    return variable.name == "seed_generator_state"


def is_shared(variable):
    """Whether all ranks that have a random state draw alike."""
    return getattr(variable, "is_same_on_all_ranks", False)


def share(variables, are_shared):
    """Says whether ranks draw alike by the random states among variables."""
    for variable in filter(is_state, variables):
        variable.is_same_on_all_ranks = are_shared


def fold_rank(state, rank):
    """Gives each rank a random stream of its own, derived from rank 0's."""
    state.is_folded_by_rank = True
    seed, counter = keras.ops.convert_to_numpy(state)
    mixed = np.random.SeedSequence([int(seed), rank]).generate_state(1)[0]
    if rank:
        state.assign(np.array([mixed, counter], dtype="uint32"))


def drawn_by_rank(rank):
    """While entered, unseeded random operations draw differently on each rank.

    For a step, in which each rank computes another part. Rank 0 draws as
    before, and all ranks stay at the same place of their common streams. A
    step within a `strategy.run` draws as the run does.
    """
    if _drawing and _drawing[-1] == rank:
        return contextlib.nullcontext()
    return _drawn_by_rank(rank)


@contextlib.contextmanager
def _drawn_by_rank(rank):
    change = (rank - (_drawing[-1] if _drawing else 0)) * _BETWEEN_RANKS
    with (
        contexts.on_top(_drawing, rank),
        random_seeds.random_operations_seeded(lambda seed: seed + change),
    ):
        yield


@contextlib.contextmanager
def run_by_rank(rank):
    """While entered, a `strategy.run` draws differently on each rank.

    Also by states of layers that are not folded, as those of a custom loop:
    they stay the same on all ranks, and each rank draws by another seed.
    """

    def change(generator, seed):
        state = generator.state
        is_own = not is_shared(state) and not random_seeds.is_global(generator)
        if getattr(state, "is_folded_by_rank", False) or not is_own:
            return seed
        apart = tf.constant([rank * _BETWEEN_RANKS, 0], seed.dtype)
        return seed + apart

    with drawn_by_rank(rank), patches.next_seeds_are_changed(change):
        yield


def host_states():
    """Python's and NumPy's random states, as text."""
    kind, keys, *rest = np.random.get_state()
    return json.dumps([random.getstate(), [kind, keys.tolist(), *rest]])


def parsed(text):
    """Python's and NumPy's random states from the text of `host_states`.

    Raises:
        ValueError: if the text is damaged. NumPy would read beyond its
            state's end for a position outside of it.
    """
    try:
        (version, internal, gauss), numpy_state = json.loads(text)
        kind, keys, position, has_gauss, next_gauss = numpy_state
        if kind != "MT19937" or len(keys) != 624 or not 0 <= position <= 624:
            raise ValueError("NumPy's is no state of its MT19937")
        random.Random().setstate((version, tuple(internal), gauss))
        numpy_state = (kind, keys, position, has_gauss, float(next_gauss))
        np.random.RandomState(0).set_state(numpy_state)
    except (
        *(ValueError, TypeError, KeyError, OverflowError),
        RecursionError,
    ) as error:
        raise ValueError(
            "the random states are damaged: "
            f"{type(error).__name__}: {reprlib.repr(str(error))}"
        ) from error
    return (version, tuple(internal), gauss), numpy_state


def set_host_states(text):
    """Sets the random states in the text of `host_states`."""
    python_state, numpy_state = parsed(text)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
