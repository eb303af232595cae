"""Says what a host has, as JSON on the last line of its output.

The launcher runs it on every host before it starts anything.
"""

import importlib.metadata
import json
import os
import platform

import keras
import tensorflow as tf

from keras_sparsity import __version__, firewall
from keras_sparsity.launch import environment


def main(engine, num_ports, script):
    """Prints what this host has.

    Args:
        engine: Name of the engine.
        num_ports: How many free ports to look for, as a string.
        script: A path to look for, or empty.

    Returns:
        0, or why it cannot take part.
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
        ports = environment.free_ports(int(num_ports))
    except ValueError as error:
        return f"keras-sparsity: {error}"
    found = {
        "versions": versions,
        "num_cores": len(os.sched_getaffinity(0)),
        "ports": ports,
        "has_script": not script or os.path.exists(script),
        "addresses": firewall.own_addresses(),
        # Client address and port, server address and port.
        "connection": os.environ.get("SSH_CONNECTION", "").split(),
    }
    print(json.dumps(found))
    return 0
