"""Brings the engine of this process up, once."""

import functools
import importlib
import os
import platform
import random

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity import checks, compat, settings
from keras_sparsity._version import __version__
from keras_sparsity.collectives import arrival, journal, topology, watch
from keras_sparsity.collectives.base import (
    GROUPS,
    Collectives,
    raise_if_different,
)
from keras_sparsity.collectives.local import LocalEngine
from keras_sparsity.collectives.topology import Topology

ENGINES = ("local", "native", "horovod")

_started = None
_agreed_seeds = []


def current():
    """The collectives of this process; those of one process if none began.

    Example:

    >>> from keras_sparsity import collectives
    >>> collectives.current().size
    1
    """
    return _started or _single_process()


def start(engine=None, timeout=None):
    """Brings the engine up, before TensorFlow runs its first operation.

    Calling it again changes nothing but the timeout, where one is given.

    Where the program has set no random seed by then, the ranks agree on one:
    the environment's KERAS_SPARSITY_SEED, else one drawn anew.

    Args:
        engine: "local", "native" or "horovod". By default "horovod" if
            `horovodrun` started this process (HOROVOD_RANK is set), else
            "native" if TF_CONFIG names more than one worker, else "local".
        timeout: Seconds for which a rank may keep the others waiting, at
            the start and later, before all of them are ended; the same on
            all ranks, at least 5. By default the environment's
            KERAS_SPARSITY_TIMEOUT, else 600.

    Returns:
        `Collectives` of all processes.

    Raises:
        ValueError: If another engine runs already, or is unknown; if the
            ranks' timeouts or versions differ.
    """
    global _started
    seconds = settings.checked_timeout(timeout)
    if engine is not None and not (
        isinstance(engine, str) and engine in ENGINES
    ):
        raise ValueError(
            f"Unknown engine {checks.spell(engine)}. Expected one of "
            f"{ENGINES}, or None to find it from the environment. Received: "
            f"engine of type {type(engine).__name__}."
        )
    if _started is not None:
        if engine not in (None, _started.engine):
            raise ValueError(
                f"The engine {_started.engine!r} runs already in this "
                f"process; it cannot be changed to {engine!r}. Ask for one "
                "engine only, first thing in the program."
            )
        if timeout is not None:
            _started.check_equal(seconds, "The timeout")
            watch.set_timeout(seconds)
        return _started
    engine = engine or _found_engine()
    if engine == "local":
        _started = _single_process()
    else:
        module = importlib.import_module(f"keras_sparsity.collectives.{engine}")
        with arrival.expected(seconds, module.others()):
            _started = _bring_up(module, seconds)
    if _started.size > 1 or settings.SEED_VARIABLE in os.environ:
        _agree_seeds(_started)
    return _started


def _found_engine():
    if "HOROVOD_RANK" in os.environ:
        return "horovod"
    return "native" if len(settings.cluster()) > 1 else "local"


@functools.cache
def _single_process():
    engine = LocalEngine()
    alone = {label: Collectives(engine, Topology(), label) for label in GROUPS}
    return Collectives(engine, Topology(), groups=alone)


def _bring_up(module, timeout_seconds):
    engine, machine = module.bring_up()
    notes = journal.current()
    first = Collectives(
        engine, Topology(engine.rank, engine.size), journal=notes
    )
    # One message for all that the ranks must know of each other.
    facts = first.gather_objects(
        {
            "machine": machine,
            "versions": _versions(),
            "timeout": timeout_seconds,
        },
        "start/facts",
    )
    _check_facts(facts)
    machines = [each["machine"] for each in facts]
    collectives = Collectives(
        engine,
        _place(engine, machines),
        journal=notes,
        groups=_groups(engine, machines, notes),
        machines=topology.numbered(machines),
    )
    if collectives.size > 1:
        watch.start(collectives, engine.abort, engine.close, timeout_seconds)
    return collectives


def _versions():
    return {
        "Python": platform.python_version(),
        "TensorFlow": tf.__version__,
        "Keras": keras.__version__,
        "keras_sparsity": __version__,
    }


def _check_facts(facts):
    raise_if_different(
        [each["versions"] for each in facts],
        "The versions",
        "Install the same ones for every rank.",
    )
    raise_if_different([each["timeout"] for each in facts], "The timeout")


def _place(engine, machines):
    place = topology.topology_of(engine.rank, machines)
    given = topology.override(engine.rank, engine.size)
    if given is not None and given != place:
        raise ValueError(
            f"{topology.OVERRIDE} says {given} on rank {engine.rank}, but the "
            f"machines of all ranks, {machines}, make it {place}. Number the "
            "ranks machine by machine, with as many on each."
        )
    return place


def _groups(engine, machines, notes):
    """dict of the `Collectives` of the groups that this process is in."""
    found = {}
    for label, groups in topology.groups(machines).items():
        ranks = next(ranks for ranks in groups if engine.rank in ranks)
        part = engine if len(groups) == 1 else engine.split(groups, label)
        rank, size = ranks.index(engine.rank), len(ranks)
        within = (
            (rank, size, 0, 1) if label == "machine" else (0, 1, rank, size)
        )
        place = Topology(rank, size, *within)
        found[label] = Collectives(part, place, label, tuple(ranks), notes)
    return found


def _agree_seeds(collectives):
    """Gives all ranks one random stream, where the user has set none.

    The ranks run the same program: a shuffle without a seed must come to the
    same order on each.
    """
    seed = settings.seed()
    if seed is None:
        seed = random.SystemRandom().randrange(2**31)
    seed = collectives.gather_objects(seed, "start/seed")[0]
    if compat.global_seed() is None:
        random.seed(seed)
        np.random.seed(seed)
        tf.random.set_seed(seed)
        _agreed_seeds.append(seed)


def agreed_seed():
    """TensorFlow's global seed that `start` chose; None where the user did."""
    return _agreed_seeds[-1] if _agreed_seeds else None
