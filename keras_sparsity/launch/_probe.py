"""Says what a host has, as JSON on the last line of its output.

The launcher runs it on every host before it starts anything.
"""

import importlib.metadata
import json
import os
import platform
import sys

import keras
import tensorflow as tf

import keras_sparsity
from keras_sparsity import firewall
from keras_sparsity.launch import environment


def main():
    engine, num_ports, script = sys.argv[1:]
    versions = {
        "python": platform.python_version(),
        "keras_sparsity": keras_sparsity.__version__,
        "keras": keras.__version__,
        "tensorflow": tf.__version__,
    }
    if engine == "horovod":
        try:
            versions["horovod"] = importlib.metadata.version("horovod")
        except importlib.metadata.PackageNotFoundError:
            versions["horovod"] = "none"
    found = {
        "versions": versions,
        "num_cores": len(os.sched_getaffinity(0)),
        "ports": environment.free_ports(int(num_ports)),
        "has_script": not script or os.path.exists(script),
        "addresses": firewall.own_addresses(),
        # Client address and port, server address and port.
        "connection": os.environ.get("SSH_CONNECTION", "").split(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
