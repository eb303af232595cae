"""Several things measured in turn, so that other work falls on all alike."""

import statistics
import time


def in_turn(runs, num_rounds):
    """Calls each of several functions in each round.

    Every other round goes in the opposite order.

    Args:
        runs: dict from a name to a function without arguments.
        num_rounds: how often each is called.

    Returns:
        dict from the name to the list of returned values.
    """
    found = {name: [] for name in runs}
    for index in range(num_rounds):
        for name in list(runs)[:: -1 if index % 2 else 1]:
            found[name].append(runs[name]())
    return found


def interleaved(steps, num_rounds, num_warm_up=3):
    """Seconds of a step of each of several functions, in turn.

    Args:
        steps: dict from a name to a function that runs one step.
        num_rounds: how often each is run.
        num_warm_up: steps of each before the first round.

    Returns:
        dict from the name to a list of seconds, one for each round.
    """

    def timed(step):
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    for step in steps.values():
        for _ in range(num_warm_up):
            step()
    return in_turn(
        {name: lambda step=step: timed(step) for name, step in steps.items()},
        num_rounds,
    )


def median_ratio(seconds, others):
    """Median over the rounds of one function's seconds / another's."""
    return statistics.median(
        a / b for a, b in zip(seconds, others, strict=True)
    )
