"""Settings that users make by environment variables, checked."""

import json
import math
import os
import re
import reprlib

from keras_sparsity.machines import door, slurm

# Adding an engine: see CONTRIBUTING.md.
ENGINES = ("local", "native", "horovod")
# pip alone cannot compile it, see setup.py.
INSTALL_HOROVOD = (
    "compile it by scripts/install_horovod.sh, of keras_sparsity's repository"
)

TIMEOUT_VARIABLE = "KERAS_SPARSITY_TIMEOUT"
# Replaces the random seed that rank 0 draws for all ranks.
SEED_VARIABLE = "KERAS_SPARSITY_SEED"
# The number of processes that are dedicated servers: the last ranks.
SERVERS_VARIABLE = "KERAS_SPARSITY_SERVERS"
# Set by a rank that has started: its process, and what made it that rank.
_STARTED_VARIABLE = "KERAS_SPARSITY_STARTED"
# Jobs of TF_CONFIG with a rank for each task, in the order of ranks.
_JOBS = ("chief", "worker", "ps")
_SERVER_JOB = _JOBS[-1]
# The ranks look at each other twice a second, and Python's lock may be held
# for a second or two (imports).
_SHORTEST_TIMEOUT_SECONDS = 5.0


def checked_timeout(seconds=None, name="`timeout`"):
    """A timeout in seconds; by default the environment's, else 600.

    It must be a finite number of at least 5. The name is for the message.
    """
    if seconds is None:
        name, seconds = TIMEOUT_VARIABLE, os.environ.get(TIMEOUT_VARIABLE, 600)
    try:
        if isinstance(seconds, bool):
            raise TypeError
        number = float(seconds)
    except Exception:  # whatever an object's own method raises
        number = math.nan
    if not _SHORTEST_TIMEOUT_SECONDS <= number < math.inf:
        raise ValueError(
            f"{name} must be a number of seconds, at least "
            f"{_SHORTEST_TIMEOUT_SECONDS:g} (ranks may be silent for less "
            f"without any failure). Received: {reprlib.repr(seconds)}."
        )
    return number


def seed(variables=os.environ):
    """The random seed in `variables`, or None."""
    given = variables.get(SEED_VARIABLE)
    if given is None:
        return None
    if not re.fullmatch(r"\d{1,10}", given.strip()) or int(given) >= 2**32:
        raise ValueError(
            f"{SEED_VARIABLE} must be a whole number from 0 to 2**32 - 1. "
            f"Received: {given!r}."
        )
    return int(given)


def num_servers(size, tasks=()):
    """The number of dedicated servers, which are the last ranks.

    Args:
        size: The number of processes.
        tasks: Those of `cluster`, if they are the processes.

    Raises:
        ValueError: If it is not a number that leaves a worker.
    """
    of_cluster = sum(kind == _SERVER_JOB for kind, *_ in tasks)
    given = os.environ.get(SERVERS_VARIABLE, "").strip()
    if not given:
        number, source = of_cluster, "TF_CONFIG"
    elif re.fullmatch(r"\d{1,9}", given):
        number, source = int(given), SERVERS_VARIABLE
    else:
        raise ValueError(
            f"{SERVERS_VARIABLE} must be a whole number, of the processes "
            f"that are dedicated servers. Received: {given!r}."
        )
    if of_cluster not in (0, number):
        raise ValueError(
            f'{SERVERS_VARIABLE} and the job "ps" of TF_CONFIG must give '
            f"the same number of servers. Received: {number} and {of_cluster}."
        )
    if number and number >= size:
        raise ValueError(
            "Dedicated servers need at least one worker beside them. "
            f"Received: {number} servers among {size} processes, by {source}."
        )
    return number


def mark_started():
    """Has processes that inherit this one's environment know that it runs."""
    os.environ[_STARTED_VARIABLE] = f"{os.getpid()} {_place()}"


def is_of_child():
    """Whether the place in the environment is that of a process that runs.

    A rank's own child, as of `multiprocessing` by `spawn`, which imports the
    script again, has the rank's environment and is no rank.
    """
    number, _, place = os.environ.get(_STARTED_VARIABLE, "").partition(" ")
    return place == _place() and number != str(os.getpid())


def _place():
    """Of a rank, by whatever started it."""
    names = "TF_CONFIG", "HOROVOD_RANK", "HOROVOD_SIZE", door.JOINS_VARIABLE
    names += slurm.PLACE_VARIABLES
    return json.dumps([os.environ.get(name) for name in names])


def check_horovod():
    """Checks the ranks and sizes in Horovod's environment variables."""
    for kind in ("", "LOCAL_", "CROSS_"):
        names = f"HOROVOD_{kind}RANK", f"HOROVOD_{kind}SIZE"
        given = {name: os.environ.get(name) for name in names}
        if set(given.values()) == {None}:
            continue
        are_numbers = all(
            re.fullmatch(r"\d{1,9}", v or "") for v in given.values()
        )
        if not are_numbers or int(given[names[0]]) >= int(given[names[1]]):
            raise ValueError(
                f"{names[0]} and {names[1]} must be whole numbers, the rank "
                f"from 0 to the size - 1. Received: {given}. Start the ranks "
                "with horovodrun or `keras-sparsity run`, which set them, or "
                "unset all of them."
            )


def _is_of_slurm():
    return "TF_CONFIG" not in os.environ and slurm.is_task()


def cluster():
    """The training processes of TF_CONFIG, or without it of Slurm's step.

    Returns:
        List of `(type, index, address)`, in TensorFlow's order: the chief,
        workers, then servers, which are the tasks of the job "ps".
    """
    if _is_of_slurm():
        return [("worker", *task) for task in enumerate(slurm.addresses())]
    config = _tf_config()
    jobs = config.get("cluster") or {}
    _check_config(isinstance(jobs, dict), '"cluster" must be an object')
    tasks = []
    for kind in _JOBS:
        addresses = jobs.get(kind) or []
        _check_config(isinstance(addresses, list), f'"{kind}" must be a list')
        for index, address in enumerate(addresses):
            _check_config(
                _is_address(address),
                f'each "{kind}" must be "host:port", not {address!r}',
            )
            tasks.append((kind, index, address))
    _check_config(
        not tasks or tasks[0][0] != _SERVER_JOB,
        'servers, which are the tasks of "ps", need a "worker" beside them',
    )
    addresses = [address for _, _, address in tasks]
    for address in addresses:
        _check_config(
            addresses.count(address) == 1,
            f"each process needs an address of its own, not {address!r} twice",
        )
    return tasks


def cluster_rank(tasks):
    """The rank of this process among the `tasks` of `cluster`."""
    if _is_of_slurm():
        return slurm.rank()
    task = _tf_config().get("task")
    _check_config(
        isinstance(task, dict) and {"type", "index"} <= task.keys(),
        '"task" must be an object with "type" and "index", this process\'s',
    )
    kind, index = task["type"], task["index"]
    if isinstance(index, str) and index.isdecimal():
        index = int(index)
    _check_config(
        isinstance(index, int) and not isinstance(index, bool),
        f'the "index" of "task" must be a whole number, not {index!r}',
    )
    for rank, task in enumerate(tasks):
        if (kind, index) == task[:2]:
            return rank
    raise ValueError(
        f"TF_CONFIG names this process {kind} {index}, which its cluster does "
        "not list. Its training processes are "
        f"{[f'{kind} {index}' for kind, index, _ in tasks]}."
    )


def _tf_config():
    text = os.environ.get("TF_CONFIG", "").strip()
    try:
        config = json.loads(text or "{}")
    except (ValueError, RecursionError):
        config = None
    _check_config(isinstance(config, dict), "it must be a JSON object")
    return config


def _check_config(is_valid, expected):
    if not is_valid:
        raise ValueError(
            f"TF_CONFIG is not valid: {expected}. Received: "
            f"{os.environ['TF_CONFIG']!r}. Expected, for two processes: "
            '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, '
            '"task": {"type": "worker", "index": 0}}.'
        )


def _is_address(value):
    if not isinstance(value, str):
        return False
    port = re.fullmatch(r"[^\s/]+:(\d{1,5})", value)
    return port is not None and 0 < int(port[1]) < 2**16
