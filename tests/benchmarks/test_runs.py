"""Runs and the file of their figures."""

import dataclasses
import json

from _results import Results
from _runs import WAYS, WORKLOADS, RunError
from sets import SETS
from workloads import _common

import keras_sparsity as ks
from tests.benchmarks.figures import RUN, make_figures, make_options

lm = _common.module("lm")


def test_every_run_can_be_started():
    for of in SETS.values():
        runs = of.runs(make_options())
        assert len(runs) == len(set(runs))
        for run in runs:
            assert run.way in WAYS and run.workload in WORKLOADS
            takes_long = run.expected_step_seconds() > 60
            assert run.steps >= (2 if takes_long else 4) and run.warm_up >= 2
            assert 0 < run.expected_seconds() < 3600


def test_runs_are_kept_and_failures_run_again(tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    # The same processes train the first and the third.
    first, second, third = (
        dataclasses.replace(RUN, rate=rate, steps=10 * rate, way=way)
        for rate, way in ((1, "hybrid"), (2, "ps"), (3, "hybrid"))
    )
    begun, failing = [], {second}

    def execute(runs, timeout):
        begun.append(([run.rate for run in runs], timeout))
        if failing & set(runs):
            raise RunError("exit code 1\nits last words")
        return [{"words_per_second": run.rate} for run in runs]

    results = Results(str(path), execute)
    results.run_all([first, second, first, third], 60)
    assert begun == [([1, 3], 60), ([2], 60)]
    assert "exit code 1\nits last words" in results.failures[second]
    assert "its last words" in capsys.readouterr().err
    assert results.get(second) is None
    assert results.get(third)["words_per_second"] == 3

    # Ended while it wrote a line.
    path.write_text(path.read_text() + '{"run": {"workl')
    begun.clear()
    failing.clear()
    results = Results(str(path), execute)
    assert "line 3: no run" in capsys.readouterr().err
    results.run_all([first, second, third], 60)
    assert begun == [([2], 60)]
    assert "1 runs in 1 trainings" in capsys.readouterr().err
    results = Results(str(path), execute)
    assert [
        results.get(r)["words_per_second"] for r in (first, second, third)
    ] == [1, 2, 3]
    lines = [line for line in path.read_text().splitlines() if line[-1] == "}"]
    assert [json.loads(line)["run"]["rate"] for line in lines] == [1, 3, 2]


def test_lines_of_other_sizes_or_versions_do_not_count(tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    run = dataclasses.replace(RUN, size="large")
    Results(
        str(path), lambda runs, _: [make_figures(run) for run in runs]
    ).run_all([run], 60)
    line = json.loads(path.read_text())
    assert line["sizes"]["vocabulary"] == lm.SIZES["large"]["vocabulary"]
    assert line["versions"]["keras_sparsity"] == ks.__version__
    assert Results(str(path)).get(run) == line["figures"]

    def read(line, **arguments):
        path.write_text(json.dumps(line) + "\n")
        results = Results(str(path), **arguments)
        return results.get(run) is not None, results.why_missing(run)

    older = {**line, "versions": {**line["versions"], "keras": "3.5.0"}}
    unknown = {k: line[k] for k in ("run", "figures")}
    unknown["figures"] = {**line["figures"], "workload": line["sizes"]}
    for other, why in (
        (older, "keras 3.5.0"),
        (unknown, "unrecorded versions"),
    ):
        counts, said = read(other)
        assert not counts and why in said
        assert why in capsys.readouterr().err
        assert read(other, for_report=True)[0]
        results = Results(str(path), for_report=True)
        assert why in results.versions_of([run])
    smaller = {**line, "sizes": {**line["sizes"], "vocabulary": 7}}
    counts, said = read(smaller, for_report=True)
    assert not counts and "{'vocabulary': 7}" in said
    # The same options by hand are sizes, too.
    other = dataclasses.replace(run, arguments=("--vocabulary", "7"))
    by_hand = {**smaller, "run": dataclasses.asdict(other)}
    path.write_text(json.dumps(by_hand) + "\n")
    assert Results(str(path)).get(other) == line["figures"]
