"""Trainings on an emulated cluster, each run once and kept in a file."""

import argparse
import collections
import contextlib
import dataclasses
import functools
import io
import json
import os
import subprocess
import sys
import time
import traceback

import _network
import _timing
from cluster import Cluster
from workloads import _common

_FOLDER = os.path.dirname(os.path.abspath(__file__))
# Of what a run that failed has printed.
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
    "horovod": Way(peer="horovod.py"),
    "horovod fp16": Way(("--fp16",), "horovod.py"),
    "horovod dense": Way(("--dense",), "horovod.py"),
    "tensorflow ps": Way((), "parameter_server.py", makes_cluster=True),
}

# What is counted; megabytes: of the dense variables, of the rows that a process
# needs in a step, repeated ones counted, and of the tables; and seconds that a
# process computes, if all do so on two cores, for each of them. With
# `--size large`, roughly: only how long a run takes is guessed from them.
WORKLOADS = {
    "lm": ("words", 0.4, 11, 411, 0.05),
    "nmt": ("words", 3.4, 3.4, 7.7, 0.25),
    "recommender": ("samples", 0.5, 14, 370, 0.05),
    "resnet50": ("images", 94, 0, 0, 0.8),
    "inception_v3": ("images", 87, 0, 0, 0.8),
}
# Of these, with `--size small`.
_SMALL = 0.3
_WINDOW_SECONDS = 20
_LONG_STEP_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Run:
    """A training at one rate, and all that its figures depend on.

    One that differs from another in `rate`, `steps` and `warm_up` alone can
    come behind it in the same processes.

    Attributes:
        workload, way: of `WORKLOADS` and `WAYS`.
        machines, processes: how many, and on each.
        rate: Mbit/s of each machine's link.
        engine: of this library; a peer has its own.
        steps, warm_up: those that count, and those before, without a limit.
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
        """Roughly, on two cores."""
        megabits = 8 * _megabytes_sent(self)
        seconds = WORKLOADS[self.workload][-1] * self.num_ranks
        if self.size == "small":
            megabits *= _SMALL
            seconds *= _SMALL
        return megabits / self.rate + seconds

    def expected_seconds(self):
        """That of its window, likewise."""
        return (_network.SETTLE + self.steps) * self.expected_step_seconds()

    @property
    def processes_of(self):
        """The same of all that the same processes can train."""
        if "--target" in self.arguments:
            return self
        return dataclasses.replace(self, rate=0, steps=0, warm_up=0)

    def sized(self):
        """The same with as many steps as fit into the window."""
        step_seconds = self.expected_step_seconds()
        fewest = 4 if step_seconds < _LONG_STEP_SECONDS else 2
        steps = max(fewest, min(40, round(_WINDOW_SECONDS / step_seconds)))
        return dataclasses.replace(
            self, steps=steps, warm_up=max(3, min(10, steps // 2))
        )


def _megabytes_sent(run):
    """By the busiest machine in a step, roughly."""
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
    """Lists of those that the same processes train, in their order."""
    groups = {}
    for run in dict.fromkeys(runs):
        groups.setdefault(run.processes_of, []).append(run)
    return list(groups.values())


def expected_seconds(runs):
    """Roughly, of runs in any number of processes."""
    starts = sum(15 + 8 * group[0].num_ranks for group in together(runs))
    return starts + sum(run.expected_seconds() for run in runs)


class RunError(RuntimeError):
    """Raised when a training has ended without figures."""


def execute(runs, timeout):
    """The figures of what the same processes train, of each of the runs.

    They are what the script reports, and `busy_before`, the share of the
    processors that others have had.

    Args:
        runs: list of `Run` that differ in rate and steps alone.
        timeout: seconds after which it is ended.

    Raises:
        RunError: If there are none.
    """
    busy = _network.busy_share()
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        start = _program if WAYS[runs[0].way].makes_cluster else _script
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


def _program(runs, timeout):
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
        finally:  # it ends what it has started
            process.terminate()
    print(output)
    last = (output.strip().splitlines() or [""])[-1]
    figures = json.loads(last) if last.startswith("{") else {}
    return {**figures, "exit_code": process.returncode}


def _common_arguments(runs):
    run = runs[0]
    arguments = [*WAYS[run.way].arguments, *run.arguments]
    if run.cycle is not None and _ALONE in arguments:
        arguments.remove(_ALONE)  # Its bytes are what is asked for.
    if run.size:
        arguments += ["--size", run.size]
    return [
        *arguments,
        *("--steps", ",".join(str(run.steps) for run in runs)),
        *("--warm-up", str(run.warm_up)),
    ]


# Of a workload's arguments, those that are none of its sizes.
_NO_SIZES = {"size", "steps", "warm_up", "learning_rate", "target", "every"}
_NO_SIZES |= {"most_steps", "held_out", "follows"}


@functools.cache
def _sizes(workload, size, arguments):
    options = argparse.ArgumentParser()
    arguments = [*(("--size", size) if size else ()), *arguments]
    found = _common.parse(_common.module(workload), options, arguments)
    return {k: v for k, v in vars(found).items() if k not in _NO_SIZES}


def sizes(run):
    """What `--size` and the arguments stand for today."""
    return _sizes(run.workload, run.size, run.arguments)


class Results:
    """What runs have given, in a file of one JSON object on each line.

    A run that is in the file is not run again, unless it has failed. A line
    is written when its run is through, so nothing is lost when the program is
    ended. It holds the versions and the workload's sizes: a line of other
    sizes does not count, nor does one of other versions unless asked for.

    Args:
        path: the file, made if there is none; None to keep nothing.
        execute: function of a list of `Run`, which the same processes train,
            and a timeout, that gives the figures of each.
        of_any_version: whether lines of other versions, or of unknown ones,
            count.

    Attributes:
        failures: dict from each run that has failed to what it said.
    """

    def __init__(self, path=None, execute=execute, of_any_version=False):
        self._path, self._execute = path, execute
        self._of_any_version = of_any_version
        self._found, self._versions, self._ignored = {}, {}, {}
        self.failures = {}
        if path:
            # Whether it can be written to shows before hours of runs.
            with open(path, "a+") as file:
                file.seek(0)
                self._read(file.read())

    def get(self, run):
        """Its figures, or None."""
        return self._found.get(run)

    def versions_of(self, runs):
        """In words, those that these runs were measured with."""
        found = [self._versions.get(run) for run in runs if run in self._found]
        numbers = collections.Counter(map(_spell_versions, found))
        return "; ".join(f"{of}: {n} runs" for of, n in numbers.items())

    def why_missing(self, run):
        """Why there are no figures of a run."""
        why = self.failures.get(run) or self._ignored.get(run) or "not run"
        return why.partition("\n")[0]

    def left_to_do(self, runs):
        """In words: how many of these runs, and how long they may take."""
        left = self._left(runs)
        known = len(set(runs)) - len(left)
        trainings, seconds = len(together(left)), expected_seconds(left)
        return (
            f"{len(left)} runs in {trainings} trainings, about "
            + _spell(seconds)
            + f"; {known} more are known" * bool(known)
        )

    def _left(self, runs):
        return [run for run in dict.fromkeys(runs) if run not in self._found]

    def run_all(self, runs, timeout):
        """Runs those that have no figures yet, one after the other.

        Args:
            runs: list of `Run`.
            timeout: seconds for each.
        """
        left = together(self._left(runs))
        say(self.left_to_do(runs))
        for index, group in enumerate(left):
            to_go = expected_seconds(sum(left[index:], []))
            others = "".join(f", {run.rate:g}" for run in group[1:])
            say(
                f"{index + 1}/{len(left)} {group[0]}{others} "
                f"(to go: {_spell(to_go)})"
            )
            self._run(group, timeout)

    def _run(self, runs, timeout):
        begin = time.monotonic()
        try:
            found = self._execute(runs, timeout)
        except Exception as error:
            # The others are worth having without it.
            if not isinstance(error, RunError):
                traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"
            self.failures |= dict.fromkeys(runs, failure)
            say(f"  failed: {failure}")
            return
        seconds = time.monotonic() - begin
        for run, figures in zip(runs, found, strict=True):
            say(
                f"  {run.rate:g} Mbit/s: {figures['words_per_second']:,.0f} "
                f"{WORKLOADS[run.workload][0]}/s"
            )
            self._found[run] = figures
            self._versions[run] = _timing.versions()
            if self._path:
                self._write(run, figures)
        say(f"  {seconds:.0f} s")

    def _read(self, text):
        for number, line in enumerate(text.splitlines(), 1):
            try:
                found = json.loads(line)
                fields = found["run"]
                fields["arguments"] = tuple(fields["arguments"])
                self._keep(Run(**fields), found)
            except (ValueError, KeyError, TypeError):
                say(f"{self._path}, line {number}: no run; left alone")
        for why, number in collections.Counter(self._ignored.values()).items():
            say(f"{self._path}: {number} lines do not count: {why}")
        if text and not text.endswith("\n"):  # ended while it was written
            with open(self._path, "a") as file:
                file.write("\n")

    def _keep(self, run, line):
        expected, versions = sizes(run), line.get("versions")
        # Lines of before they had any say it among their figures.
        of_line = line.get("sizes") or line["figures"].get("workload", {})
        others = {k: of_line.get(k) for k in expected}
        if others != expected:
            of_line, now = (
                {k: of[k] for k in expected if others[k] != expected[k]}
                for of in (others, expected)
            )
            self._ignored[run] = (
                f"{run.workload} of other sizes, {of_line}, now {now}"
            )
        elif not self._of_any_version and versions != _timing.versions():
            self._ignored[run] = (
                f"of {_spell_versions(versions)}, now "
                f"{_spell_versions(_timing.versions())}"
            )
        else:
            self._found[run], self._versions[run] = line["figures"], versions

    def _write(self, run, figures):
        line = json.dumps(
            {
                "run": dataclasses.asdict(run),
                "versions": _timing.versions(),
                "sizes": sizes(run),
                "figures": figures,
            }
        )
        with open(self._path, "a") as file:
            file.write(line + "\n")


def _spell_versions(versions):
    if not versions:
        return "versions that were not written down"
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def say(line):
    """Progress, apart from the tables."""
    print(line, file=sys.stderr, flush=True)


def _spell(seconds):
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"
