"""Processes of one training that something else than the launcher starts."""

import os
import subprocess
import sys


def outputs(arguments, variables):
    """What Python prints in processes that all must end well.

    Args:
        arguments: those of Python, in each process.
        variables: for each process, a dict of further environment variables.
    """
    running = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, **of_process},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for of_process in variables
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * len(said), said
    return said
