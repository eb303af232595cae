"""Starts the processes of a training run.

`keras-sparsity run -n 4 train.py` on the command line, `launch.run` for a
function. What stands where: `hosts.py` which process runs where,
`environment.py` the variables that tell it so, `processes.py` starting,
watching and ending them, `_child.py` what each runs first, `functions.py` and
`command_line.py` the two ways in, `remote.py` other machines over ssh.
"""

from keras_sparsity.launch.functions import LaunchError, run

__all__ = ["LaunchError", "run"]
