"""Checks a host; prints its facts as JSON on the last line of output.

The launcher runs this on every host before it starts any rank.
"""

import importlib.metadata
import json
import os
import platform

import keras
import tensorflow as tf

from keras_sparsity import __version__
from keras_sparsity.launch import environment
from keras_sparsity.machines import addresses, ports


def main(engine, num_ports, script):
    """Prints the facts of this host.

    Args:
        num_ports: Number of free ports to find, as a string.
        script: A path that must exist, or empty.

    Returns:
        0, or the reason why the host cannot take part.
    """
    versions = {
        "python": platform.python_version(),
        "keras_sparsity": __version__,
        "keras": keras.__version__,
        "tensorflow": tf.__version__,
    }
    if engine == "horovod":
        try:
            versions["horovod"] = importlib.metadata.version("horovod")
        except importlib.metadata.PackageNotFoundError:
            versions["horovod"] = "none"
    try:
        environment.check_memory(int(num_ports))
        free = ports.free(int(num_ports))
    except ValueError as error:
        return f"keras-sparsity: {error}"
    found = {
        "versions": versions,
        "num_cores": len(os.sched_getaffinity(0)),
        "ports": free,
        "has_script": not script or os.path.exists(script),
        "addresses": addresses.of_interfaces(),
        # Client address and port, server address and port.
        "connection": os.environ.get("SSH_CONNECTION", "").split(),
    }
    print(json.dumps(found))
    return 0
