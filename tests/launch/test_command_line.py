"""The command `keras-sparsity`; `test_wrong_usage.py` has wrong usage."""

import os
import pathlib
import subprocess
import sys

import pytest

import keras_sparsity
from keras_sparsity import launch
from keras_sparsity.launch import show_commands

_ROOT = str(pathlib.Path(__file__).parents[2])


@pytest.mark.parametrize(
    "arguments",
    ["--help", "run --help", "plan --help", "run", "run -n 0 a", "run -n 2 a"],
)
def test_the_command_imports_no_tensorflow(arguments, tmp_path):
    command = "from keras_sparsity.launch import main; main()"
    paths = [*filter(None, [_ROOT, os.environ.get("PYTHONPATH")])]
    for start in (
        ["-m", "keras_sparsity.launch"],
        ["-c", f"import sys; sys.argv[0] = 'bin/keras-sparsity'; {command}"],
    ):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *start, *arguments.split()],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        assert "usage: keras-sparsity" in done.stdout + done.stderr
        imported = {
            line.rpartition("|")[2].strip().partition(".")[0]
            for line in done.stderr.splitlines()
            if line.startswith("import time:")
        }
        assert "keras_sparsity" in imported
        assert not imported & {"tensorflow", "keras"}


def test_without_a_command_all_are_listed(capsys):
    assert launch.main([]) == 2
    told = capsys.readouterr().err
    assert all(f"    {name} " in told for name in ("run", "plan", "report"))


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        launch.main(["--version"])
    told = capsys.readouterr().out
    assert told == f"keras-sparsity {keras_sparsity.__version__}\n"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.touch()
    return str(path)


def test_horovod_that_is_not_installed(script, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        launch.main(["run", "-n", "2", "--engine", "horovod", script])
    told = capsys.readouterr().err
    # Lines are broken to the terminal's width.
    assert "scripts/install_horovod.sh" in told
    assert "or use --engine native." in " ".join(told.split())


def test_ctrl_c_ends_a_plan_without_a_traceback(capsys, monkeypatch):
    def show(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(show_commands, "show", show)
    try:
        code = launch.main(["plan", "model.keras"])
    except KeyboardInterrupt:  # which would end all tests
        pytest.fail("The command raises KeyboardInterrupt.")
    assert code == 130
    assert capsys.readouterr().err == ""
