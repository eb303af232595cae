"""Brings the engine of this process up, once."""

import functools
import json
import os

from keras_sparsity.collectives.base import Collectives
from keras_sparsity.collectives.local import LocalEngine

ENGINES = ("local", "native", "horovod")

_started = None


def current():
    """The collectives of this process; those of one process if none began.

    Example:

    >>> from keras_sparsity import collectives
    >>> collectives.current().size
    1
    """
    return _started or _single_process()


def start(engine=None):
    """Brings the engine up, before TensorFlow runs its first operation.

    Calling it again changes nothing.

    Args:
        engine: "local", "native" or "horovod". By default "horovod" if
            `horovodrun` started this process (HOROVOD_RANK is set), else
            "native" if TF_CONFIG names more than one worker, else "local".

    Returns:
        `Collectives` of all processes.

    Raises:
        ValueError: If another engine runs already, or is unknown.
    """
    global _started
    if engine is not None and engine not in ENGINES:
        raise ValueError(
            f"Unknown engine {engine!r}. Expected one of {ENGINES}, or None "
            "to find it from the environment."
        )
    if _started is not None:
        if engine not in (None, _started.engine):
            raise ValueError(
                f"The engine {_started.engine!r} runs already in this "
                f"process; it cannot be changed to {engine!r}. Ask for one "
                "engine only, first thing in the program."
            )
        return _started
    _started = _BRING_UP[engine or _found_engine()]()
    return _started


def _found_engine():
    if "HOROVOD_RANK" in os.environ:
        return "horovod"
    cluster = json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster", {})
    workers = len(cluster.get("chief", ())) + len(cluster.get("worker", ()))
    return "native" if workers > 1 else "local"


@functools.cache
def _single_process():
    engine = LocalEngine()
    alone = {
        label: Collectives(engine, label) for label in ("machine", "across")
    }
    return Collectives(engine, groups=alone)


def _native():
    raise NotImplementedError("The native engine is not written yet.")


def _horovod():
    raise NotImplementedError("The horovod engine is not written yet.")


_BRING_UP = {
    "local": _single_process,
    "native": _native,
    "horovod": _horovod,
}
