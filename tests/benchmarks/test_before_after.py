"""The comparison of two checkouts by `benchmarks/before_after.py`."""

import json
import signal
import subprocess
import sys

import before_after
import pytest

_PROGRAM = """\
import json, os, pathlib, sys
runs = pathlib.Path(os.environ["PYTHONPATH"], "runs")
number = len(runs.read_text()) if runs.exists() else 0
runs.write_text("x" * (number + 1))
if number in {failing}:
    sys.exit("no luck")
print("a line before")
print(json.dumps({{
    "sharded / stock": {sharded}, "everything / stock": {everything},
    "stock_steps_per_second": 100.0,
}}))
print("MISSED: a limit of its own", file=sys.stderr)
sys.exit(1)
"""


@pytest.fixture
def checkout(tmp_path):
    """Function that makes a checkout whose program reports given ratios."""

    def make(name, sharded, everything=1.0, failing=()):
        root = tmp_path / name
        for folder in ("keras_sparsity", "benchmarks"):
            (root / folder).mkdir(parents=True)
        (root / "keras_sparsity" / "__init__.py").touch()
        program = _PROGRAM.format(
            sharded=sharded, everything=everything, failing=set(failing)
        )
        (root / "benchmarks" / "single_process.py").write_text(program)
        return str(root)

    return make


@pytest.fixture
def compare(monkeypatch, capsys):
    """`compare(*arguments)`: the exit code, the last line, and progress.

    It runs in this process, which looks at the processors for 0.05 s, not for
    1 s, before each run.
    """
    share = before_after._network.busy_share
    monkeypatch.setattr(
        before_after._network, "busy_share", lambda: share(0.05)
    )
    handler = signal.getsignal(signal.SIGTERM)

    def compare(*arguments):
        options = ["--cases", "single_process", "--minutes", "0"]
        monkeypatch.setattr(
            sys, "argv", [before_after.__file__, *arguments, *options]
        )
        with pytest.raises(SystemExit) as ended:
            before_after.main()
        output, progress = capsys.readouterr()
        return ended.value.code, json.loads(output.splitlines()[-1]), progress

    yield compare
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(
    ("new", "passed"), [(1.0, True), (0.985, True), (0.975, False)]
)
def test_the_new_one_may_take_two_percent_longer(
    checkout, compare, new, passed
):
    code, figures, progress = compare(
        checkout("old", 1.0), checkout("new", new), "--rounds", "2"
    )
    assert (code == 0) == figures["passed"] == passed
    assert (
        figures["ratios"]["single_process, sharded / stock"]
        == [pytest.approx(1 / new, abs=1e-4)] * 2
    )
    assert figures["ratios"]["single_process, control: stock"] == [1.0, 1.0]
    is_said = "sharded / stock: 1.026 ± 0.000 times as long" in progress
    assert is_said != passed


def test_a_failed_run_is_reported_and_repeated(checkout, compare):
    code, figures, progress = compare(
        checkout("old", 1.0, failing=[1]), checkout("new", 1.0), "--rounds", "2"
    )
    assert code == 0
    assert len(figures["ratios"]["single_process, sharded / stock"]) == 2
    assert "round 3" in progress and "round 4" not in progress
    assert "single_process, old: no figures" in progress
    assert "no luck" in progress


def test_a_program_that_always_fails_is_a_miss(checkout, compare):
    code, figures, progress = compare(
        checkout("old", 1.0),
        checkout("new", 1.0, failing=range(9)),
        "--rounds",
        "2",
    )
    assert code == 1 and not figures["passed"]
    assert "MISSED: single_process: 0 of 2 rounds measured" in progress


@pytest.mark.parametrize("name", ["no-such-commit", "tests"])
def test_other_folders_and_names_are_refused(checkout, name, monkeypatch):
    monkeypatch.chdir(before_after._ROOT)
    done = subprocess.run(
        [sys.executable, before_after.__file__, name]
        + ["--cases", "single_process"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "no folder and no commit" in done.stderr or (
        "there is no keras_sparsity" in done.stderr
    )


def test_further_rounds_are_for_ratios_at_the_limit():
    def case(ratios):
        found = before_after.Case((), dict, 1.0)
        found.found = {
            "old": [{"step": 1.0, "control: stock": 1.0} for _ in ratios],
            "new": [{"step": r, "control: stock": 9 * r} for r in ratios],
        }
        return found

    assert case([1.0]).is_undecided()
    assert case([1.0, 1.03]).is_undecided()
    assert not case([1.0, 1.001]).is_undecided()
    assert not case([1.1, 1.11]).is_undecided()
