"""What the benchmarks share: interleaved medians, and how they end."""

import json
import os
import platform
import statistics
import sys
import time


def interleaved(steps, num_rounds, num_warm_up=3):
    """Seconds of a step of each of several things, round by round.

    A round runs each of them once, so that what else the machine does falls on
    all alike; every other round in the opposite order.

    Args:
        steps: dict from a name to a function that runs one step.
        num_rounds: how often each is run.
        num_warm_up: steps of each before the first round.

    Returns:
        dict from the name to a list of seconds, one for each round.
    """
    for step in steps.values():
        for _ in range(num_warm_up):
            step()
    seconds = {name: [] for name in steps}
    for index in range(num_rounds):
        for name in list(steps)[:: -1 if index % 2 else 1]:
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(seconds, others):
    """Median over the rounds of what one took, in terms of the other."""
    return statistics.median(
        a / b for a, b in zip(seconds, others, strict=True)
    )


def finish(figures, misses):
    """Prints the figures as the last line and ends the process.

    Args:
        figures: dict of what was measured.
        misses: list of sentences, each a figure that misses what was asked.
    """
    for miss in misses:
        print(f"MISSED: {miss}", file=sys.stderr)
    figures = {**figures, "machine": machine(), "passed": not misses}
    print(json.dumps(figures), flush=True)
    sys.exit(1 if misses else 0)


def machine():
    """The processor and the versions."""
    return {
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        **versions(),
    }


def versions():
    """Of this library and what it stands on."""
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
