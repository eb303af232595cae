"""Starts the engine of this process, once."""

import functools
import importlib
import logging
import os
import platform
import random
import sys

import keras
import numpy as np
import tensorflow as tf

from keras_sparsity._tf import checks, random_seeds
from keras_sparsity._version import __version__
from keras_sparsity.collectives import devices
from keras_sparsity.collectives.base import GROUPS, Collectives
from keras_sparsity.collectives.differences import raise_if_different
from keras_sparsity.collectives.local import LocalEngine
from keras_sparsity.health import arrival, errors, journal, watch
from keras_sparsity.machines import door, helper, settings, slurm, topology
from keras_sparsity.machines.topology import Topology

_started = None
_agreed_seed = None
_lasting = None
_left = None


def current():
    """The collectives of this process; before `start`, those of one process.

    Returns:
        `Collectives`.

    Raises:
        Nothing: `start` raises it.

    Example:

    >>> from keras_sparsity import collectives
    >>> collectives.current().size
    1

    References:
        EuroSys 4.1.
    """
    return _started or single_process()


def start(engine=None, timeout=None):
    """Starts the engine, before TensorFlow runs its first operation.

    Later calls change nothing but the timeout, if they give one.

    If the program has set no random seed by then, the ranks agree on one: the
    environment's KERAS_SPARSITY_SEED, or a random one.

    Args:
        engine: "local", "native" or "horovod". By default "horovod" if
            `horovodrun` started this process (HOROVOD_RANK is set), else
            "native" if TF_CONFIG names more than one process or Slurm's
            `srun` started more than one task, else "local".
        timeout: Seconds for which a rank may keep the others waiting, at
            the start and later, before all of them are ended; the same on
            all ranks, at least 5. By default the environment's
            KERAS_SPARSITY_TIMEOUT, else 600.

    Returns:
        `Collectives` of all processes.

    Raises:
        ValueError: If another engine runs already, or is unknown; if the
            ranks' timeouts or versions differ.

    Example:

    >>> from keras_sparsity import collectives
    >>> collectives.start("local").engine
    'local'

    References:
        EuroSys 4.1.
    """
    global _started
    seconds = settings.checked_timeout(timeout)
    if engine is not None:
        otherwise = ", or None to find it from the environment"
        checks.one_of("engine", engine, settings.ENGINES, otherwise)
    if settings.is_of_child() and current().engine == "local":
        engine = "local"  # Its parent is the rank.
    if _started is not None:
        if engine not in (None, _started.engine):
            raise ValueError(
                f"The engine {_started.engine!r} runs already in this "
                f"process; it cannot be changed to {engine!r}. Ask for one "
                "engine only, first thing in the program."
            )
        if timeout is not None:
            # After a loss the engine may be dead.
            (_lasting or _started).check_equal(seconds, "The timeout")
            watch.set_timeout(seconds)
        return _started
    seed = settings.seed()
    if seed is None:
        seed = random.SystemRandom().randrange(2**31)
    engine = engine or _found_engine()
    if engine == "local":
        _started = single_process()
    elif facts := door.facts():
        _started = _joined(facts, engine)
    else:
        module = importlib.import_module(f"keras_sparsity.collectives.{engine}")
        with (
            helper.ends_by_ctrl_c(),
            helper.running(
                arrival.end_when_late, os.getpid(), seconds, module.others()
            ),
        ):
            _started, seed = _bring_up(module, seconds, seed)
        settings.mark_started()
    if _started.size > 1 or settings.SEED_VARIABLE in os.environ:
        _take_seed(seed)
    return _started


def go_on_by(collectives, left):
    """From now on, these are the ones that outlast the loss of a rank.

    Args:
        left: as the function of this name.
    """
    global _lasting, _left
    _lasting, _left = collectives, left


def lasting():
    """The `Collectives` given to `go_on_by`, or None."""
    return _lasting


def left():
    """The `Collectives` of the processes that are not lost, numbered anew.

    All ranks call it together; a process that has not joined them is alone.
    """
    if _left is not None:
        return _left()
    return single_process() if door.facts() else current()


def _found_engine():
    """The engine's name, by how this process was started."""
    if "HOROVOD_RANK" in os.environ:
        return "horovod"
    if len(settings.cluster()) > 1:
        return "native"
    _tell_of_mpi()
    _tell_of_slurm()
    return "local"


def _tell_of_mpi():
    """Says so, on the first process, where MPI has started several alone."""
    for prefix in ("OMPI_COMM_WORLD_", "PMI_"):
        size, rank = (os.environ.get(prefix + x) for x in ("SIZE", "RANK"))
        if size not in (None, "1") and rank == "0":
            logging.getLogger(__name__).warning(
                "%s processes were started by MPI, and each trains alone. To "
                "train one model together use HybridStrategy(engine="
                '"horovod"), with a Horovod compiled with MPI, or start them '
                "by `keras-sparsity run`.",
                size,
            )


def _tell_of_slurm():
    """Says so where a job has several tasks and srun has started none."""
    if size := slurm.num_unused_tasks():
        logging.getLogger(__name__).warning(
            "This process trains alone, in a job of Slurm that has %s tasks. "
            "Start them by `srun python %s`.",
            size,
            os.path.basename(sys.argv[0]) or "train.py",
        )


@functools.cache
def single_process():
    engine = LocalEngine()
    alone = {label: Collectives(engine, Topology(), label) for label in GROUPS}
    return Collectives(engine, Topology(), groups=alone)


def _bring_up(module, timeout_seconds, seed):
    """`(Collectives of all processes, rank 0's seed)`."""
    engine, machine = module.bring_up()
    notes = journal.current()
    errors.set_sources(notes)
    tasks = settings.cluster() if engine.name == "native" else ()
    servers = settings.num_servers(engine.size, tasks)
    first = Collectives(
        engine, Topology(engine.rank, engine.size), journal=notes
    )
    facts = _facts_of_ranks(first, machine, timeout_seconds, servers, seed)
    machines = [each["machine"] for each in facts]
    collectives = Collectives(
        engine,
        _place(engine, machines),
        journal=notes,
        groups=_groups(engine, machines, notes),
        machines=topology.numbered(machines),
        num_servers=servers,
    )
    if collectives.size > 1:
        watch.start(
            collectives, notes, engine.abort, engine.close, timeout_seconds
        )
    return collectives, facts[0]["seed"]


def _facts_of_ranks(collectives, machine, timeout_seconds, servers, seed):
    """What ranks compare or share when they start, by rank, in one message."""
    facts = collectives.gather_objects(
        {
            "machine": machine,
            "versions": {
                "Python": platform.python_version(),
                "TensorFlow": tf.__version__,
                "Keras": keras.__version__,
                "keras_sparsity": __version__,
            },
            "timeout": timeout_seconds,
            "servers": servers,
            "seed": seed,
        },
        "start/facts",
    )
    for name, what, *fix in (
        ("versions", "The versions", "Install the same ones for every rank."),
        ("timeout", "The timeout"),
        ("servers", "The number of servers"),
    ):
        raise_if_different([each[name] for each in facts], what, *fix)
    return facts


def _joined(facts, engine):
    """The `Collectives` of a process that joins others, until it has: alone.

    Their engine has no place for it. The facts are those of `door`.
    """
    notes = journal.current()
    errors.set_sources(notes)
    rank = int(os.environ.get("HOROVOD_RANK", 0))
    if engine == "native":
        rank = settings.cluster_rank(settings.cluster())
    size, servers = facts["size"], facts["servers"]
    place = topology.topologies(facts["machines"])[rank]
    devices.pin_gpu(place.local_rank, place.local_size)
    watch.join(rank, facts["watch"], notes)
    return Collectives(
        LocalEngine(engine),
        Topology(rank, size),
        journal=notes,
        machines=tuple(facts["machines"]),
        num_servers=servers,
    )


def _place(engine, machines):
    place = topology.topologies(machines)[engine.rank]
    given = topology.override(engine.rank, engine.size)
    if given is not None and given != place:
        raise ValueError(
            f"{topology.OVERRIDE} says {given} on rank {engine.rank}, but the "
            f"machines of all ranks, {machines}, make it {place}. Number the "
            "ranks machine by machine, with as many on each."
        )
    return place


def _groups(engine, machines, notes):
    """dict of the `Collectives` of this process's groups."""
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


def _take_seed(seed):
    """Seeds the random streams, unless the user has.

    The ranks run one program: a shuffle without a seed must give all of them
    the same order.
    """
    global _agreed_seed
    if random_seeds.global_seed() is None:
        random.seed(seed)
        np.random.seed(seed)
        tf.random.set_seed(seed)
        _agreed_seed = seed


def agreed_seed():
    """TensorFlow's global seed, if `start` chose it, else None.

    Raises:
        Nothing: `start` raises it.

    Example:

    >>> from keras_sparsity import collectives
    >>> collectives.agreed_seed() is None  # this program started no engine
    True

    References:
        None: one random stream replaces the seeds of the paper's scripts.
    """
    return _agreed_seed
