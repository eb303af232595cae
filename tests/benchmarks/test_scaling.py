"""The limits of the sets of `benchmarks/scaling.py`."""

import _report
import pytest
import scaling
from _results import Results
from _runs import RunError
from sets import SETS

from tests.benchmarks.figures import make_figures, make_options

# `_good` is within all limits; each of these is outside of one.
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
    options = make_options()

    def report(worse, failed=(), folder=None):
        def execute(runs, timeout):
            if runs[0].way in failed:
                raise RunError("no luck")
            return [
                make_figures(run, **{**_good(run), **worse.get(run.way, {})})
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
