"""`launch.run`: a function in several fresh processes."""

import os
import pathlib
import subprocess
import sys
import textwrap
import time
import types

import pytest

from keras_sparsity import launch
from keras_sparsity.launch.functions import Job, describe_call
from tests import launch_functions
from tests.conftest import engines

_ROOT = str(pathlib.Path(__file__).parents[2])


def _said(text, start):
    return [line for line in text.splitlines() if line.startswith(start)]


@pytest.mark.parametrize("engine", engines(usually="native"))
def test_run_returns_the_results_by_rank(engine, capfd):
    results = launch.run(
        launch_functions.describe,
        2,
        engine,
        args=(1, "two"),
        kwargs={"three": 3},
        machines=2,
        timeout=120,
        env={"MINE": "given", "TF_NUM_INTRAOP_THREADS": "3"},
    )
    assert [r["rank"] for r in results] == [0, 1]
    assert [r["cross"] for r in results] == [(0, 2), (1, 2)]
    for result in results:
        assert result["size"] == 2
        assert result["engine"] == engine
        assert result["local"] == (0, 1)
        assert result["args"] == (1, "two")
        assert result["kwargs"] == {"three": 3}
        assert result["variable"] == "given"
        assert result["threads"] == "3"
    # One program: the same random numbers, the same order of sets.
    assert results[0]["random"] == results[1]["random"]
    assert results[0]["hash"] == results[1]["hash"]
    assert len({r["process"] for r in results} | {os.getpid()}) == 3
    output, errors = capfd.readouterr()
    assert _said(output, "output of") == ["output of rank 0"]
    assert _said(errors, "errors of") == ["errors of rank 0"]


def test_run_raises_and_tells_how_each_rank_failed():
    start = time.monotonic()
    with pytest.raises(launch.LaunchError) as error:
        launch.run(launch_functions.fail_or_die, 2, args=(1,), timeout=120)
    message = str(error.value)
    assert message.startswith("Rank 1 of 2 was killed by SIGKILL")
    assert "these are my last words" in message
    assert "ValueError: no luck on rank 0" in message
    assert 'launch_functions.py", line' in message
    assert time.monotonic() - start < 60


def test_run_says_where_ranks_were_when_the_time_is_over():
    with Job(launch_functions.hang, 1, args=(0,)) as job:
        (process,) = job.processes.processes
        while "hanging" not in process.last_lines():
            assert not job.processes.failed()
            time.sleep(0.1)
        with pytest.raises(launch.LaunchError) as error:
            job.wait(timeout=0.5)
    message = str(error.value)
    assert "Not done within 0.5 seconds" in message
    assert "rank 0 was still running" in message
    assert "time.sleep(600)" in message


_OF_ITSELF = textwrap.dedent("""\
    from keras_sparsity import launch
    {imports}

    class Own:
        value = 20

    def function(own):
        return own.value + 1

    if __name__ == "__main__":
        print("results", launch.run(function, 1, args=(Own(),)))
    """)


def _run(arguments, folder):
    paths = filter(None, [_ROOT, os.environ.get("PYTHONPATH")])
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


@pytest.mark.parametrize(
    ("arguments", "imports"),
    [
        (["package/main.py"], "import math"),
        (["-m", "package.main"], "from . import other"),
    ],
    ids=["script", "module"],
)
def test_run_takes_a_function_of_the_script_itself(
    tmp_path, arguments, imports
):
    package = tmp_path / "package"
    package.mkdir()
    for name in ("__init__", "other"):
        (package / f"{name}.py").touch()
    (package / "main.py").write_text(_OF_ITSELF.format(imports=imports))
    done = _run(arguments, tmp_path)
    assert _said(done.stdout, "results") == ["results [21]"], done.stderr


def test_a_main_module_may_be_another_one_than_its_alias(monkeypatch):
    """As in a notebook."""
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    assert sys.modules["__mp_main__"] is not sys.modules["__main__"]
    describe_call(len, (), {})


@pytest.mark.parametrize("call", ["main, 1", "print, 1, args=(Own(),)"])
def test_a_script_that_calls_it_without_a_guard_is_told_so(tmp_path, call):
    script = tmp_path / "train.py"
    script.write_text(
        "from keras_sparsity import launch\n"
        "class Own: pass\n"
        "def main(): pass\n"
        f"launch.run({call})\n"
    )
    done = _run([script], tmp_path)
    assert 'below `if __name__ == "__main__":`' in done.stderr


def test_what_was_typed_into_a_shell_is_refused(tmp_path):
    code = "\n".join(
        [
            "import operator",
            "from keras_sparsity import launch",
            "class Own: pass",
            "launch.run(operator.not_, 1, args=(Own(),))",
        ]
    )
    done = _run(["-c", code], tmp_path)
    assert "Move it to a file of its own" in done.stderr
