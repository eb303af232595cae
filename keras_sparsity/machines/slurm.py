"""The tasks of a step of Slurm, by the variables that `srun` gives to each.

A task knows the step's machines and the number of tasks on each, and its own
place among them: enough to number the tasks without asking anybody. Slurm's
own numbers depend on `srun --distribution`; these are machine by machine.
TensorFlow's `SlurmClusterResolver` sorts the machines by name, node10 before
node2, and needs a GPU on each (seen on 2.18 and 2.21).
"""

import itertools
import os
import re

from keras_sparsity.machines import ports

# Tasks of other jobs on the machine most often have another sixteen.
_PORTS_OF_STEP = 16
# The first steps of a job, and jobs that follow each other, differ.
_JOBS_BETWEEN_STEPS = 131

# Of a task alone, and of a program of a job outside of `srun`: 1, or nothing.
STEP_VARIABLE = "SLURM_STEP_NUM_TASKS"
# `srun --mpi=pmi2` sets the second to the number of tasks.
_SIZES_BY_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_TERMINAL_VARIABLE = "SLURM_PTY_PORT"
# They make a task that task.
PLACE_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID")


def is_task():
    """Whether this process is one of several tasks of a step.

    `mpirun` starts its own helpers as tasks, and processes inherit from them.
    """
    size = os.environ.get(STEP_VARIABLE, "").strip()
    of_mpi = [os.environ.get(name, size) for name in _SIZES_BY_MPI]
    is_alone = size in ("", "0", "1") or _is_of_shell()
    return not is_alone and set(of_mpi) == {size}


def num_unused_tasks():
    """How many tasks a job has, if srun has not started this process; else 0.

    Programs of a batch script are started once, on its first machine.
    """
    size = os.environ.get("SLURM_NTASKS", "")
    is_of_job = "SLURM_JOB_ID" in os.environ and STEP_VARIABLE not in os.environ
    return int(size) if is_of_job and size.isdecimal() and size != "1" else 0


def _is_of_shell():
    """Whether the user of `srun --pty bash` has started this process.

    Of its tasks all but the first have ended. Tasks that srun starts from that
    shell have the variable, too, and no terminal.
    """
    if _TERMINAL_VARIABLE not in os.environ:
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def addresses():
    """Where the tasks listen: a list of `"host:port"`, machine by machine.

    Raises:
        ValueError: If a variable of Slurm's is missing or unknown in form.
    """
    job, step = _number("SLURM_JOB_ID"), _number("SLURM_STEP_ID")
    first = (job + step * _JOBS_BETWEEN_STEPS) * _PORTS_OF_STEP
    hosts = _read("SLURM_STEP_NODELIST", _hosts)
    counts = _counts()
    if len(hosts) != len(counts):
        raise _error("SLURM_STEP_NODELIST", f"{len(counts)} machines")
    return [
        f"{host}:{ports.RANGE[(first + number) % len(ports.RANGE)]}"
        for host, count in zip(hosts, counts, strict=True)
        for number in range(count)
    ]


def rank():
    """The index of this task in `addresses`."""
    node = _number("SLURM_NODEID")
    return sum(_counts()[:node]) + _number("SLURM_LOCALID")


def _counts():
    return _read("SLURM_STEP_TASKS_PER_NODE", _repeated)


def _number(name):
    return _read(name, int)


def _read(name, read):
    try:
        return read(os.environ[name].strip())
    except (KeyError, ValueError) as error:
        raise _error(name, "as srun sets it") from error


def _error(name, expected):
    return ValueError(
        f"{STEP_VARIABLE} says that this process is one of several tasks of "
        f"Slurm, and {name} does not say where they are. Received: "
        f"{os.environ.get(name)!r}. Expected: {expected}. Start the tasks by "
        'srun, set TF_CONFIG, or use `engine="local"` for processes that '
        "train alone."
    )


def _hosts(text):
    """The machines' names of `"a,b[1-2,07]"`: `["a", "b1", "b2", "b07"]`."""
    if not re.fullmatch(r"(?:[^\s,[\]]|,(?=.)|\[[\d,-]+\])+", text):
        raise ValueError(text)
    found = []
    for part in re.findall(r"(?:[^,[]|\[.*?\])+", text):
        # The names' fixed parts stand at even places, lists at odd ones.
        pieces = re.split(r"\[(.*?)\]", part)
        pieces[::2] = [[fixed] for fixed in pieces[::2]]
        pieces[1::2] = [_numbers(listed) for listed in pieces[1::2]]
        found += map("".join, itertools.product(*pieces))
    return found


def _numbers(text):
    """`"1-3,07"` as `["1", "2", "3", "07"]`."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = int(last or first)
        found += [str(n).zfill(len(first)) for n in range(int(first), last + 1)]
    return found


def _repeated(text):
    """`"2(x3),1"` as `[2, 2, 2, 1]`."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(text)
        found += [int(match[1])] * int(match[2] or 1)
    return found
