"""Programs of the guides of Keras and TensorFlow give what one process gives.

Each (see `guide_programs.py`) runs twice: under TensorFlow's default strategy
in this process, and in two processes with one line changed, that of the
strategy, in a custom loop also that of the optimizer.
"""

import numpy as np
import pytest
import tensorflow as tf

import keras_sparsity as ks
from tests import guide_programs
from tests.conftest import engines

# Each on one engine.
PROGRAMS = {
    guide_programs.fit_and_restore: "native",
    guide_programs.fit_with_callbacks: "horovod",
    guide_programs.load_without_strategy: "native",
    guide_programs.fit_workers: "horovod",
    guide_programs.loop_with_metrics: "native",
    guide_programs.loop_of_workers: "horovod",
    guide_programs.read_input: "native",
}


def run_distributed(name, folder):
    program = getattr(guide_programs, name)
    return program(ks.HybridStrategy(), ks.HybridOptimizer, folder)


# Keras says so of every `fit(dataset)` that does not say `shuffle=False`.
@pytest.mark.filterwarnings("ignore:.*shuffle=True.*will be ignored")
@pytest.mark.parametrize(
    ("engine", "program"),
    [
        pytest.param(
            engine, program, marks=engines(engine)[0].marks, id=program.__name__
        )
        for program, engine in PROGRAMS.items()
    ],
)
def test_a_guides_program(cluster, engine, program, tmp_path):
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    expected = program(
        tf.distribute.get_strategy(),
        lambda optimizer: optimizer,
        str(folders[0]),
    )
    for found in cluster(engine, 2).run(
        run_distributed, program.__name__, str(folders[1])
    ):
        assert_close(found, expected)


def assert_close(found, expected, where="result"):
    """The same structure of names and numbers."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, str):
        assert found == expected, where
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), where
        for index, (ours, theirs) in enumerate(
            zip(found, expected, strict=True)
        ):
            assert_close(ours, theirs, f"{where}[{index}]")
    else:
        np.testing.assert_allclose(
            found, expected, rtol=1e-4, atol=1e-5, err_msg=where
        )
