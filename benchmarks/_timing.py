"""What the benchmarks share: interleaved medians, and how they end."""

import json
import platform
import statistics
import sys
import time

now = time.perf_counter


def interleaved(steps, num_rounds, steps_per_round, num_warm_up=3):
    """Median seconds of a step of each of several things.

    A round runs each of them in turn, so that what else the machine does
    falls on all alike.

    Args:
        steps: dict from a name to a function that runs one step.
        num_rounds: how often each is run.
        steps_per_round: number of steps that a round times together.
        num_warm_up: steps of each before the first round.

    Returns:
        dict from the name to seconds.
    """
    for step in steps.values():
        for _ in range(num_warm_up):
            step()
    seconds = {name: [] for name in steps}
    for _ in range(num_rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(steps_per_round):
                step()
            elapsed = time.perf_counter() - start
            seconds[name].append(elapsed / steps_per_round)
    return {name: statistics.median(s) for name, s in seconds.items()}


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
    import keras
    import tensorflow as tf

    return {
        "processor": _processor(),
        "num_cores": tf.config.threading.get_inter_op_parallelism_threads()
        or _num_cores(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }


def _num_cores():
    import os

    return len(os.sched_getaffinity(0))


def _processor():
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
