"""What `benchmarks/scaling.py` concludes from what it has measured."""

import argparse
import dataclasses
import json

import _report
import _rows
import _traffic
import numpy as np
import pytest
import scaling
from _runs import WAYS, WORKLOADS, Results, Run, RunError
from sets import SETS
from workloads import _common

import keras_sparsity as ks

lm = _common.module("lm")

RUN = Run("lm", "hybrid", machines=4, rate=50)


def test_rows_against_sets_of_python():
    generator = np.random.default_rng(1)
    ids = generator.zipf(1.3, (5, 4, 12)) % 30
    needs = [[set(part.tolist()) for part in step] for step in ids]
    by_any = [set.union(*step) for step in needs]
    machines = [[a | b, c | d] for a, b, c, d in needs]
    pulls = [(t, u) for s, u in zip(needs[1:], by_any, strict=False) for t in s]
    pushes = [
        (t, u) for s, u in zip(needs, by_any[1:], strict=False) for t in s
    ]
    assert _rows.count(ids, num_machines=2, num_rows=30) == pytest.approx(
        {
            "alpha": np.mean([[len(t) / 30 for t in s] for s in needs]),
            "alpha_machine": np.mean(
                [[len(t) / 30 for t in s] for s in machines]
            ),
            "changed_pulls": _share(pulls),
            "needed_pushes": _share(pushes),
        }
    )


def _share(pairs):
    return sum(len(t & u) for t, u in pairs) / sum(len(t) for t, _ in pairs)


# Two tables of 1,000 rows, one of them an output's kernel with its bias, and
# 500 dense elements.
def _figures(
    run, sparse_factor=1.0, words=1000.0, step=1.0, headers=1.0, to_target=50.0
):
    """Such as a run gives whose sparse bytes are so many times the least."""
    together = "no local" not in run.way
    itemsize = 2 if "16" in run.way else 4
    asked = run.processes * 0.02
    if together and run.processes == 2:
        asked = 0.03
    share = (run.machines - 1) / run.machines
    rows = 4 * asked * 1000 * (64 + 64 + 1) * itemsize * share
    ids = 2 * 2 * asked * 1000 * 2 * share
    size = run.machines * run.processes
    dense = 4 * 500 * itemsize * (size - 1) / size
    payload = (sparse_factor * rows + ids + dense) / 2
    each_way = {"": payload * headers, "payload_": payload}
    table = {
        "architecture": "ps",
        "alpha": 0.02,
        "alpha_machine": 0.03 if run.processes == 2 else 0.02,
    }
    counted = {
        "alpha": 0.02,
        "alpha_machine": table["alpha_machine"],
        "changed_pulls": 0.5,
        "needed_pushes": 0.25,
    }
    return {
        "machines": run.machines,
        "processes": run.processes,
        "rate_mbit": run.rate,
        "steps": 10,
        "seconds": 10 * step,
        "words_per_second": words,
        "busy_before": 0.1,
        "seconds_alone": 0.9,
        "workload": {
            "wire_dtype": "bfloat16" if "16" in run.way else None,
            "local_aggregation": together,
        },
        "per_machine": [
            {
                f"{way}_{kind}bytes_per_step": number
                for way in ("sent", "received")
                for kind, number in each_way.items()
            }
        ]
        * run.machines,
        "variables": [
            {"shape": [1000, 64], "exchange": "a", "rows": counted, **table},
            {"shape": [1000, 64], "exchange": "b", **table},
            {"shape": [1000, 1], "exchange": "b", **table},
            {"shape": [15, 20], "comes_first": True, **_DENSE},
            {"shape": [10, 20], "comes_first": False, **_DENSE},
        ],
        "to_target": {
            "is_reached": True,
            "target": 1.5,
            "least_loss": 0.5,
            "steps": 100,
            "seconds": to_target,
            "curve": [{"steps": 100, "seconds": to_target, "loss": 1.0}],
        },
    }


_DENSE = {
    "architecture": "allreduce",
    "alpha": None,
    "alpha_machine": None,
    "exchange": None,
}


def test_bytes():
    figures = _figures(RUN)
    # 20 rows of each of 2 + 1/64 tables of 64 float32, 3 of 4 elsewhere.
    assert _traffic.row_bytes(figures) == pytest.approx(
        4 * 20 * (64 + 64 + 1) * 4 * 3 / 4
    )
    # Two sets of ids: a kernel and its bias have one.
    assert _traffic.index_bytes(figures) == pytest.approx(2 * 40 * 2 * 3 / 4)
    assert _traffic.dense_bytes(figures) == pytest.approx(4 * 500 * 4 * 3 / 4)
    assert _traffic.row_ratio(figures) == pytest.approx(1)
    with_headers = _figures(RUN, headers=1.02)
    rows, ids = _traffic.row_bytes(figures), _traffic.index_bytes(figures)
    assert _traffic.row_ratio(with_headers) == pytest.approx(
        (1.02 * (rows + ids) - ids) / rows
    )
    narrow = _figures(dataclasses.replace(RUN, way="hybrid bfloat16"))
    assert _traffic.row_ratio(narrow) == pytest.approx(0.5)
    elements = 1000 * 129 + 500
    assert _traffic.alpha_model(figures) == pytest.approx(
        (0.02 * 1000 * 129 + 500) / elements
    )


@pytest.mark.parametrize("rate", [0.05, 5000])
def test_bound(rate):
    figures = _figures(dataclasses.replace(RUN, rate=rate))
    parts = _traffic.step_bound(figures, _traffic.busiest_bytes(figures))
    bytes_per_second = rate * 1e6 / 8
    sent = figures["per_machine"][0]["sent_bytes_per_step"]
    # Of the table that the inputs ask, whose pulls and pushes are 0.75 of the
    # rows that others own; and a ring's of the dense variable that comes first.
    chain = 20 * 64 * 4 * 3 / 4 * 0.75 + 2 * 300 * 4 * 3 / 4
    assert parts["network"] == pytest.approx(sent / bytes_per_second)
    assert parts["chain"] == pytest.approx(chain / bytes_per_second)
    slow, fast = sent / bytes_per_second, 0.9 + chain / bytes_per_second
    assert parts["bound"] == pytest.approx({0.05: slow, 5000: fast}[rate])
    assert (slow > fast) == (rate == 0.05)


def test_table():
    assert _report.table("T", ["", "a b"], [["x", 1234.5], ["yy", None]]) == (
        "**T**\n\n"
        "|     | a b   |\n"
        "| --- | ----- |\n"
        "| x   | 1,234 |\n"
        "| yy  |       |\n"
    )
    cells = _report.table("", ["a"], [[0.12345], [1.2345], [0], [12.345]])
    assert [line.strip("| ") for line in cells.splitlines()[4:]] == [
        "0.123",
        "1.23",
        "0",
        "12.35",
    ]


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
    Results(str(path), lambda runs, _: [_figures(run) for run in runs]).run_all(
        [run], 60
    )
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
    for other, why in ((older, "keras 3.5.0"), (unknown, "not written down")):
        counts, said = read(other)
        assert not counts and why in said
        assert why in capsys.readouterr().err
        assert read(other, of_any_version=True)[0]
        results = Results(str(path), of_any_version=True)
        assert why in results.versions_of([run])
    smaller = {**line, "sizes": {**line["sizes"], "vocabulary": 7}}
    counts, said = read(smaller, of_any_version=True)
    assert not counts and "{'vocabulary': 7}" in said
    # The same options by hand are sizes, too.
    other = dataclasses.replace(run, arguments=("--vocabulary", "7"))
    by_hand = {**smaller, "run": dataclasses.asdict(other)}
    path.write_text(json.dumps(by_hand) + "\n")
    assert Results(str(path)).get(other) == line["figures"]


def _options(**others):
    return argparse.Namespace(
        **{
            "machines": [1, 8],
            "rates": None,
            "workloads": None,
            "engine": "horovod",
            "size": "large",
            "steps": None,
            "warm_up": None,
            "arguments": [],
            **others,
        }
    )


def test_every_run_can_be_started():
    for of in SETS.values():
        runs = of.runs(_options())
        assert len(runs) == len(set(runs))
        for run in runs:
            assert run.way in WAYS and run.workload in WORKLOADS
            takes_long = run.expected_step_seconds() > 60
            assert run.steps >= (2 if takes_long else 4) and run.warm_up >= 2
            assert 0 < run.expected_seconds() < 3600


# What `_good` gives meets all that is asked; each of these does not.
_WORSE = {
    "quick": {"hybrid": {"words": 999}},
    "speed": {"hybrid": {"words": 3999}},
    "bytes": {"hybrid bfloat16": {"sparse_factor": 1.12}},
    "aggregation": {"hybrid": {"sparse_factor": 1.05}},
    "bound": {"hybrid": {"step": 1.2}},
    "others": {"hybrid float16": {"words": 999}},
    "machines": {"hybrid bfloat16": {"words": 999}},
    "ablation": {"ps": {"words": 4200}},
    "sweep": {"naive ps": {"words": 4002}},
    "target": {"hybrid": {"to_target": 51.0}},
}


def _good(run):
    words = {
        "hybrid": 4001,
        "hybrid bfloat16": 7001,
        "naive ps": 2500,
        "ps": 4000,
        "ps, no local aggregation": 3500,
        "hybrid, no local aggregation": 3800,
        "hybrid, clipped": 1001,
    }
    return {"words": words.get(run.way, 1000)}


@pytest.mark.parametrize("name", list(SETS))
def test_a_set_passes_or_misses(name, tmp_path):
    pytest.importorskip("matplotlib")
    options = _options()

    def report(worse, failed=(), folder=None):
        def execute(runs, timeout):
            if runs[0].way in failed:
                raise RunError("no luck")
            return [
                _figures(run, **{**_good(run), **worse.get(run.way, {})})
                for run in runs
            ]

        results = Results(execute=execute)
        results.run_all(SETS[name].runs(options), 60)
        plots = _report.Plots(folder)
        return scaling.report([name], options, results, plots)

    figures, misses = report({}, folder=tmp_path)
    assert not misses
    assert figures[name]
    has_plots = name in ("machines", "ablation", "sweep", "target")
    assert bool(list(tmp_path.glob("*.png"))) == has_plots
    _, misses = report(_WORSE[name])
    assert misses and all("asked" in miss for miss in misses)
    _, misses = report({}, failed=["hybrid"])
    assert any("RunError: no luck" in miss for miss in misses)
