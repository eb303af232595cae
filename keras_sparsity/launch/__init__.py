"""Starts the processes of a training run.

`keras-sparsity run -n 4 train.py` on the command line, `launch.run` for a
function. Two ways in, `command_line.py` with `program.py`, and
`functions.py`, stand on: `hosts.py` (which process runs where),
`environment.py` (the variables that tell it so), `processes.py` (starting,
watching and ending them), `_boot.py` and `_child.py` (what each runs before
the program), and `remote.py` (other machines over ssh).

The launcher's process imports no TensorFlow, as that takes seconds.
"""

from keras_sparsity.launch.command_line import main
from keras_sparsity.launch.functions import LaunchError, run

__all__ = ["LaunchError", "main", "run"]
