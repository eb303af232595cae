"""The file of runs' figures."""

import argparse
import collections
import dataclasses
import functools
import json
import sys
import time
import traceback

import _program
from _runs import (
    WORKLOADS,
    Run,
    RunError,
    execute,
    expected_seconds,
    together,
)
from workloads import _common

# A workload's arguments that are no sizes.
_NO_SIZES = {"size", "steps", "warm_up", "learning_rate", "target", "every"}
_NO_SIZES |= {"most_steps", "held_out", "follows"}


@functools.cache
def _sizes(workload, size, arguments):
    options = argparse.ArgumentParser()
    arguments = [*(("--size", size) if size else ()), *arguments]
    found = _common.parse(_common.module(workload), options, arguments)
    return {k: v for k, v in vars(found).items() if k not in _NO_SIZES}


def sizes(run):
    """The workload's sizes by `--size` and the arguments."""
    return _sizes(run.workload, run.size, run.arguments)


class Results:
    """The figures of runs, in a file of one JSON object per line.

    A run in the file is not repeated. Its line is written when the run ends, so
    an interrupted program loses nothing, and holds the versions and the
    workload's sizes: lines of other sizes do not count, nor, except for a
    report, lines of other versions.

    Args:
        path: the file, made if there is none; None to keep nothing.
        execute: function from a list of `Run` that share processes and a
            timeout to the figures of each.
        for_report: whether lines of other or unrecorded versions, and of other
            numbers of steps, count.

    Attributes:
        failures: dict from each failed run to its error.
    """

    def __init__(self, path=None, execute=execute, for_report=False):
        self._path, self._execute = path, execute
        self._for_report = for_report
        self._found, self._versions, self._ignored = {}, {}, {}
        self.failures = {}
        if path:
            # A file that cannot be written fails before hours of runs.
            with open(path, "a+") as file:
                file.seek(0)
                self._read(file.read())

    def get(self, run):
        """Its figures, or None."""
        return self._found.get(self._key(run))

    def versions_of(self, runs):
        """The versions that these runs were measured with, in words."""
        keys = dict.fromkeys(map(self._key, runs))
        found = [self._versions.get(key) for key in keys if key in self._found]
        numbers = collections.Counter(map(_spell_versions, found))
        return "; ".join(f"{of}: {n} runs" for of, n in numbers.items())

    def why_missing(self, run):
        """Why there are no figures of a run."""
        ignored = self._ignored.get(self._key(run))
        why = self.failures.get(run) or ignored or "not run"
        return why.partition("\n")[0]

    def left_to_do(self, runs):
        """The number of runs left and their estimated time, in words."""
        left = self._left(runs)
        known = len(set(runs)) - len(left)
        trainings, seconds = len(together(left)), expected_seconds(left)
        return (
            f"{len(left)} runs in {trainings} trainings, about "
            + _spell(seconds)
            + f"; {known} more are known" * bool(known)
        )

    def _left(self, runs):
        return [run for run in dict.fromkeys(runs) if self.get(run) is None]

    def _key(self, run):
        """The key of a run: a report takes any number of timed steps."""
        if self._for_report:
            return dataclasses.replace(run, steps=0, warm_up=0)
        return run

    def run_all(self, runs, timeout):
        """Executes the runs without figures, one after the other.

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
            # The others go on.
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
            self._found[self._key(run)] = figures
            self._versions[self._key(run)] = _program.versions()
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
        run = self._key(run)
        # Lines without sizes have them among their figures.
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
        elif not self._for_report and versions != _program.versions():
            self._ignored[run] = (
                f"of {_spell_versions(versions)}, now "
                f"{_spell_versions(_program.versions())}"
            )
        else:
            self._found[run], self._versions[run] = line["figures"], versions

    def _write(self, run, figures):
        line = json.dumps(
            {
                "run": dataclasses.asdict(run),
                "versions": _program.versions(),
                "sizes": sizes(run),
                "figures": figures,
            }
        )
        with open(self._path, "a") as file:
            file.write(line + "\n")


def _spell_versions(versions):
    if not versions:
        return "unrecorded versions"
    return ", ".join(f"{name} {number}" for name, number in versions.items())


def say(line):
    """Progress, apart from the tables."""
    print(line, file=sys.stderr, flush=True)


def _spell(seconds):
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes else f"{seconds:.0f} s"
