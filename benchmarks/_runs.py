"""Trainings on an emulated cluster."""

import contextlib
import dataclasses
import io
import os
import subprocess
import sys

import _network
import _program
from cluster import Cluster

_FOLDER = os.path.dirname(os.path.abspath(__file__))
# The last lines shown of a failed run.
_SHOWN_LINES = 30


@dataclasses.dataclass(frozen=True)
class Way:
    """How a workload is trained.

    Attributes:
        arguments: of the script.
        peer: the script in `peers/`, None for this library.
        makes_cluster: whether that one makes the cluster itself.
    """

    arguments: tuple = ()
    peer: str | None = None
    makes_cluster: bool = False


# What `_traffic.step_bound` needs.
_ALONE = "--alone"
WAYS = {
    "hybrid": Way((_ALONE,)),
    "hybrid bfloat16": Way(("--wire-dtype", "bfloat16", _ALONE)),
    "hybrid float16": Way(("--wire-dtype", "float16", _ALONE)),
    "hybrid, prefetch": Way(("--prefetch", _ALONE)),
    "hybrid, clipped": Way(("--clip", "owners")),
    "hybrid, clipped by workers": Way(("--clip", "workers")),
    "hybrid, no local aggregation": Way(("--no-local-aggregation",)),
    "ps, no local aggregation": Way(
        ("--architecture", "ps", "--no-local-aggregation")
    ),
    "ps": Way(("--architecture", "ps")),
    "naive ps": Way(("--architecture", "naive_ps")),
    "allreduce": Way(("--architecture", "allreduce")),
    "auto": Way(("--architecture", "auto")),
    "measured": Way(("--architecture", "measured")),
    "horovod": Way(peer="horovod_tape.py"),
    "horovod fp16": Way(("--fp16",), "horovod_tape.py"),
    "horovod dense": Way(("--dense",), "horovod_tape.py"),
    "ordinary": Way(("--ordinary",)),
    "asynchronous, 4": Way(("--asynchronous", "4")),
    "asynchronous, 16": Way(("--asynchronous", "16")),
    "asynchronous": Way(("--asynchronous", "none")),
    "asynchronous, bfloat16": Way(
        ("--asynchronous", "none", "--wire-dtype", "bfloat16")
    ),
    "tensorflow ps": Way((), "parameter_server.py", makes_cluster=True),
}

# The unit; megabytes of the dense variables, of the rows that a process needs
# in a step, duplicate rows included, and of the tables; seconds of computation
# of each process, all on two cores. Rough figures of `--size large`, to
# estimate how long runs take.
WORKLOADS = {
    "lm": ("words", 0.4, 11, 411, 0.05),
    "nmt": ("words", 3.4, 3.4, 7.7, 0.25),
    "recommender": ("samples", 0.5, 14, 370, 0.05),
    "resnet50": ("images", 94, 0, 0, 0.8),
    "inception_v3": ("images", 87, 0, 0, 0.8),
}
# These, with `--size small`.
_SMALL = 0.3
_WINDOW_SECONDS = 20
_LONG_STEP_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Run:
    """A training at one rate, with all that its figures depend on.

    Runs that differ in `rate`, `steps` and `warm_up` alone can share processes.

    Attributes:
        workload, way: of `WORKLOADS` and `WAYS`.
        machines, processes: numbers of machines, and of processes on each.
        rate: Mbit/s of each machine's link.
        engine: of this library; a peer has its own.
        steps, warm_up: numbers of timed steps, and of unlimited ones before.
        size: of the workload, `"small"`, `"large"`, or None for its default.
        cycle: Horovod's cycle in ms; None for its default.
        arguments: further ones of the workload's script.
    """

    workload: str
    way: str
    machines: int
    rate: float
    processes: int = 1
    engine: str = "horovod"
    steps: int = 20
    warm_up: int = 5
    size: str | None = None
    cycle: int | None = None
    arguments: tuple = ()

    def __str__(self):
        machines = f"{self.machines} machines"
        if self.processes > 1:
            machines += f" of {self.processes}"
        parts = [self.workload, self.way, machines, f"{self.rate:g} Mbit/s"]
        if not WAYS[self.way].peer:
            parts.append(f"engine {self.engine}")
        return ", ".join(
            parts + [" ".join(self.arguments)] * bool(self.arguments)
        )

    @property
    def num_ranks(self):
        return self.machines * self.processes

    def expected_step_seconds(self):
        """A rough estimate, on two cores."""
        megabits = 8 * _megabytes_sent(self)
        seconds = WORKLOADS[self.workload][-1] * self.num_ranks
        if self.size == "small":
            megabits *= _SMALL
            seconds *= _SMALL
        return megabits / self.rate + seconds

    def expected_seconds(self):
        """The same of the run's window."""
        return (_network.SETTLE + self.steps) * self.expected_step_seconds()

    @property
    def processes_of(self):
        """Equal for runs that can share processes."""
        if "--target" in self.arguments:
            return self
        return dataclasses.replace(self, rate=0, steps=0, warm_up=0)

    def sized(self):
        """The run with as many steps as fit into the window."""
        step_seconds = self.expected_step_seconds()
        fewest = 4 if step_seconds < _LONG_STEP_SECONDS else 2
        steps = max(fewest, min(40, round(_WINDOW_SECONDS / step_seconds)))
        return dataclasses.replace(
            self, steps=steps, warm_up=max(3, min(10, steps // 2))
        )


def _megabytes_sent(run):
    """A rough estimate of the busiest machine's in a step."""
    _, dense, rows, tables, _ = WORKLOADS[run.workload]
    others = run.machines - 1
    if not others:
        return 0
    width = 0.5 if "16" in run.way else 1
    if run.way in ("allreduce", "horovod dense"):
        return 2 * (dense + tables)
    if WAYS[run.way].peer:  # which gathers rows, always in 32 bits
        return 2 * dense * width + rows * (run.num_ranks - 1)
    if run.way == "naive ps":  # one server has a dense variable
        return 2 * dense * others + 2 * rows * run.processes
    return (2 * dense + rows * run.processes) * width


def together(runs):
    """Lists of runs that share processes, in their order."""
    groups = {}
    for run in dict.fromkeys(runs):
        groups.setdefault(run.processes_of, []).append(run)
    return list(groups.values())


def expected_seconds(runs):
    """A rough estimate for several runs."""
    starts = sum(15 + 8 * group[0].num_ranks for group in together(runs))
    return starts + sum(run.expected_seconds() for run in runs)


class RunError(RuntimeError):
    """Raised when a training ends without figures."""


def execute(runs, timeout):
    """The figures of runs that share processes.

    These are the script's report and `busy_before`, the share of the processors
    that other programs used.

    Args:
        runs: list of `Run` that differ in rate and steps alone.
        timeout: seconds after which the script is ended.

    Raises:
        RunError: If the script reports no figures.
    """
    busy = _network.busy_share()
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        start = _own_cluster if WAYS[runs[0].way].makes_cluster else _script
        figures = start(runs, timeout)
    if figures.get("exit_code") or "windows" not in figures:
        last = "\n".join(shown.getvalue().splitlines()[-_SHOWN_LINES:])
        raise RunError(f"exit code {figures.get('exit_code')}\n{last}".rstrip())
    return [{**f, "busy_before": busy} for f in _network.by_rate(figures)]


def _script(runs, timeout):
    """Starts a script on a cluster."""
    run, way = runs[0], WAYS[runs[0].way]
    arguments = _common_arguments(runs)
    script = os.path.join(_FOLDER, "workloads", f"{run.workload}.py")
    engine = run.engine if run.num_ranks > 1 else None
    if way.peer:
        script = os.path.join(_FOLDER, "peers", way.peer)
        arguments, engine = [run.workload, *arguments], "horovod"
    options = ["--timeout", str(timeout)]
    if run.cycle is not None:
        options += ["--env", f"HOROVOD_CYCLE_TIME={run.cycle}"]
    rates = [run.rate for run in runs]
    with Cluster(run.machines, run.processes, rates) as cluster:
        return cluster.run(script, arguments, engine, options)


def _own_cluster(runs, timeout):
    """Starts a program that makes the cluster itself."""
    run, way = runs[0], WAYS[runs[0].way]
    command = [sys.executable, os.path.join(_FOLDER, "peers", way.peer)]
    command += [run.workload, *_common_arguments(runs)]
    command += ["--machines", str(run.machines)]
    command += ["--processes", str(run.processes)]
    command += ["--rate", ",".join(str(run.rate) for run in runs)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:  # it ends its cluster
            process.terminate()
    print(output)
    figures = _program.last_json(output)
    return {**figures, "exit_code": process.returncode}


def _common_arguments(runs):
    run = runs[0]
    arguments = [*WAYS[run.way].arguments, *run.arguments]
    if run.cycle is not None and _ALONE in arguments:
        arguments.remove(_ALONE)  # Bytes alone are asked.
    if run.size:
        arguments += ["--size", run.size]
    return [
        *arguments,
        *("--steps", ",".join(str(run.steps) for run in runs)),
        *("--warm-up", str(run.warm_up)),
    ]
