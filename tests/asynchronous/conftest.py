"""Trainings that the launcher starts."""

import os
import sys

import pytest

from keras_sparsity import launch
from tests import forked


@pytest.fixture
def launched(capfd):
    """`launched(folder, num_servers, options, function, *args)` runs one.

    Returns:
        `(exit code, standard output, lines of the launcher)`.
    """

    def launched(folder, num_servers, options, function, *args):
        with forked.ranks():
            code = launch.main(
                [
                    *["run", "-n", "2", "--servers", str(num_servers)],
                    *["--log-dir", os.path.relpath(folder), *options],
                    *["-m", function.__module__, function.__name__],
                    *map(repr, args),
                ]
            )
        output, errors = capfd.readouterr()
        if code:
            print(errors, file=sys.stderr)  # which pytest shows, if unexpected
        said = [s for s in errors.splitlines() if "keras-sparsity: " in s]
        return code, output, said

    return launched
