"""The frame of a benchmark: its options, its last line and its exit code."""

import argparse
import json
import os
import platform
import sys

# Read when TensorFlow is imported, which is after this module.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def parser(description):
    """An `argparse.ArgumentParser` that keeps the description's lines."""
    return argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def finish(figures, misses):
    """Prints the figures as the last line and ends the process.

    Args:
        figures: dict of the measured figures.
        misses: list of sentences, one for each figure outside its limit.
    """
    end({**figures, "machine": {**machine(), **versions()}}, misses)


def end(figures, misses):
    """As `finish`, for a program that imports no TensorFlow."""
    for miss in misses:
        print(f"MISSED: {miss}", file=sys.stderr)
    print(json.dumps({**figures, "passed": not misses}), flush=True)
    sys.exit(1 if misses else 0)


def last_json(text):
    """The JSON object that a program printed last; empty if there is none."""
    lines = text.strip().splitlines() or [""]
    try:
        found = json.loads(lines[-1])
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def machine():
    return {
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)),
    }


def versions():
    """Of this library, TensorFlow and Keras."""
    import keras
    import tensorflow as tf

    import keras_sparsity as ks

    return {
        "keras_sparsity": ks.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }


def _processor():
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
