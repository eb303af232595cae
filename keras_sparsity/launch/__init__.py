"""Starts the processes of a training run.

Doors: `command_line.py` with `run_command.py` and `program.py` for
`keras-sparsity run -n 4 train.py`, and `functions.py` for `launch.run`. Both
use `hosts.py` (the place of each process), `environment.py` (its variables),
`rank_process.py` (the process of a rank, and its output), `processes.py`
(watching and ending all of them), `remote.py` (hosts over ssh), and `_boot.py`
and `_child.py`, which each process runs before the program.

The launcher imports no TensorFlow, which takes seconds.
"""

from keras_sparsity.launch.command_line import main
from keras_sparsity.launch.functions import LaunchError, run

__all__ = ["LaunchError", "main", "run"]
