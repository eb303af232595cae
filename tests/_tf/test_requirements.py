"""`import keras_sparsity` says what is missing, and starts nothing."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Block())
"""

VERSION = """
import keras, tensorflow
keras.__version__ = {keras!r} or keras.__version__
tensorflow.__version__ = {tensorflow!r} or tensorflow.__version__
"""


def run_python(code, **environment):
    """Runs `code` in a fresh interpreter and returns its exit and output."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize(
    "before,backend,parts",
    [
        pytest.param(
            BLOCK.format(names=["tensorflow"]),
            "tensorflow",
            ["TensorFlow is not installed", "pip install 'tensorflow-cpu>="],
            id="no-tensorflow",
        ),
        pytest.param(
            BLOCK.format(names=["tensorflow"]),
            "jax",
            ["TensorFlow is not installed", "KERAS_BACKEND=tensorflow"],
            id="no-tensorflow-and-another-backend",
        ),
        pytest.param(
            BLOCK.format(names=["keras"]),
            "tensorflow",
            ["needs Keras 3", "pip install 'keras>=3.5'"],
            id="no-keras",
        ),
        pytest.param(
            "",
            "numpy",
            ["received the backend 'numpy'", "KERAS_BACKEND=tensorflow"],
            id="numpy",
        ),
        pytest.param(
            BLOCK.format(names=["jax"]),
            "jax",
            ["received the backend 'jax'", "KERAS_BACKEND=tensorflow"],
            id="jax-that-is-not-installed",
        ),
        pytest.param(
            BLOCK.format(names=["torch"]),
            "torch",
            ["received the backend 'torch'", "KERAS_BACKEND=tensorflow"],
            id="torch-that-is-not-installed",
        ),
        pytest.param(
            VERSION.format(keras="2.15.0", tensorflow=""),
            "tensorflow",
            [
                "needs Keras 3.5 or later; received 2.15.0",
                "pip install --upgrade keras.",
            ],
            id="old-keras",
        ),
        pytest.param(
            VERSION.format(keras="", tensorflow="2.9.1"),
            "tensorflow",
            [
                "needs TensorFlow 2.16 or later; received 2.9.1",
                "pip install --upgrade tensorflow (or tensorflow-cpu, if",
            ],
            id="old-tensorflow",
        ),
    ],
)
def test_import_fails_with_one_clear_error(before, backend, parts):
    result = run_python(
        before + "\nimport keras_sparsity", KERAS_BACKEND=backend
    )
    assert result.returncode == 1, result.stderr
    last_line = result.stderr.strip().splitlines()[-1]
    assert last_line.startswith("ImportError: keras_sparsity ")
    for part in parts:
        assert part in last_line
    # One error: none that was being handled, none that caused it.
    assert result.stderr.count("Traceback") == 1


def test_import_of_broken_tensorflow_keeps_its_own_error():
    result = run_python(
        BLOCK.format(names=["tensorflow.python"]) + "\nimport keras_sparsity"
    )
    assert result.returncode == 1
    assert "No module named 'tensorflow.python'" in result.stderr
    assert "keras_sparsity needs" not in result.stderr


@pytest.mark.smoke
def test_import_takes_no_optional_package_and_starts_nothing():
    code = """
import os, sys, threading
import keras, tensorflow as tf
threads, open_files = threading.active_count(), len(os.listdir("/proc/self/fd"))
import keras_sparsity
for name in ("horovod", "tensorboard", "mpi4py"):
    if name in sys.modules:
        raise SystemExit(f"{name} was imported")
if threading.active_count() != threads:
    raise SystemExit(f"threads: {threading.enumerate()}")
if len(os.listdir("/proc/self/fd")) != open_files:
    raise SystemExit("files or sockets were left open")
from tensorflow.python.eager import context
if context.context()._context_handle is not None:
    raise SystemExit("TensorFlow's runtime was started")
"""
    # Set for a launched process: only the start of the engine may read them.
    result = run_python(code, KERAS_BACKEND="tensorflow", HOROVOD_RANK="0")
    assert result.returncode == 0, result.stderr
