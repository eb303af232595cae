"""Does a change make training slower? Two checkouts, measured in turn.

    python benchmarks/before_after.py c431dcb       # against this checkout
    python benchmarks/before_after.py OLD NEW       # folders or commits

A round runs each of four programs of both checkouts, old and new side by side
and in the opposite order every other round: `single_process.py`,
`row_update.py` and, on an emulated cluster of 4 machines, `workloads/lm.py`
and `workloads/recommender.py`. Each checkout runs its own programs and its own
library, with this interpreter; but both run the new `row_update.py`, whose rows
are others than those of older ones.

Compared are the seconds of a step, new / old: the median of the rounds' ratios,
with its standard error. Asked: at most 1.02. Figures called control run no code
of the library; they show the noise. After `--rounds` rounds, further ones
repeat the programs whose ratios lie within two standard errors of the limit, as
long as `--minutes` allow. A failed program is reported and run again in the
next round. Needs root, as `cluster.py` does, and an idle machine.
"""

import dataclasses
import importlib.util
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import _network
import _program
import _report
from cluster import Cluster, ClusterError

LIMIT = 1.02
CONTROL = "control: "
_CLUSTER = "benchmarks/cluster.py"
_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SIDES = ("old", "new")
_BY_ROWS = ("sgd", "adagrad", "adam_lazy")
_MOST_ROUNDS = 12
_TIMEOUT_SECONDS = 400
_GRACE_SECONDS = 40
# The median's standard error in terms of the mean's, of a normal distribution.
_OF_MEDIAN = math.sqrt(math.pi / 2)
# With more of the processors used by others, a ratio may be theirs.
_BUSY = 0.1


@dataclasses.dataclass
class Case:
    """A program that both checkouts run.

    Attributes:
        arguments: the program, from the checkout's root, and its arguments.
        step_seconds: function from the program's last line to a dict from a
            figure's name to the seconds of a step.
        is_of_new: whether both checkouts run the program of the new one.
        seconds: how long a run takes; measured after the first one.
        busy: the largest share of the processors that others used before.
        found: for each side, one dict of figures for each round.
    """

    arguments: tuple
    step_seconds: Callable
    seconds: float
    is_of_new: bool = False
    busy: float = 0.0
    found: dict = dataclasses.field(
        default_factory=lambda: {side: [] for side in _SIDES}
    )

    def ratios(self):
        """dict from a figure to new / old in each round."""
        pairs = list(zip(*(self.found[side] for side in _SIDES), strict=True))
        names = pairs[0][0] if pairs else ()
        return {
            name: [new[name] / old[name] for old, new in pairs]
            for name in names
        }

    def is_undecided(self):
        """Whether a ratio may lie on either side of the limit."""
        return any(
            abs(ratio - LIMIT) <= 2 * error
            for name, ratios in self.ratios().items()
            if not name.startswith(CONTROL)
            for ratio, error in [median_and_error(ratios)]
        )


def cases(engine):
    """dict from a name to its `Case`."""

    def on_cluster(workload):
        return Case(
            (
                *(_CLUSTER, "--machines", "4"),
                *("--rate", "200,1000", "--engine", engine),
                *("--timeout", str(_TIMEOUT_SECONDS - 2 * _GRACE_SECONDS)),
                *(f"benchmarks/workloads/{workload}.py", "--steps", "60,120"),
            ),
            _of_cluster,
            60,
        )

    return {
        "single_process": Case(
            ("benchmarks/single_process.py", "--rounds", "24", "--steps", "50"),
            _of_single_process,
            35,
        ),
        "row_update": Case(
            (
                *("benchmarks/row_update.py", "--num-rows", "200000"),
                *("--rounds", "150", "--rules", *_BY_ROWS),
            ),
            _of_row_update,
            30,
            is_of_new=True,
        ),
        "lm": on_cluster("lm"),
        "recommender": on_cluster("recommender"),
    }


def _of_single_process(figures):
    # In terms of stock Keras in the same process, where the machine is as fast.
    seconds = {
        f"{name} / stock": 1 / figures[f"{name} / stock"]
        for name in ("sharded", "everything")
    }
    stock = 1 / figures["stock_steps_per_second"]
    return seconds | {f"{CONTROL}stock": stock}


def _of_row_update(figures):
    return {
        f"{name}, {size} table": milliseconds / 1e3
        for name in _BY_ROWS
        for size in ("large", "small")
        for milliseconds in [
            figures["optimizers"][name][f"{size}_milliseconds"]
        ]
    }


def _of_cluster(figures):
    return {
        f"{window['rate_mbit']:g} Mbit/s": window["seconds"] / window["steps"]
        for window in figures["windows"]
    }


def main():
    args = parse_arguments()
    # `run` ends its program when this one is ended.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    chosen = {name: cases(args.engine)[name] for name in args.cases}
    if any(_CLUSTER in case.arguments for case in chosen.values()):
        check_possible()
    with tempfile.TemporaryDirectory(prefix="before-after-") as temporary:
        folders = {}
        for side, name in zip(_SIDES, (args.old, args.new), strict=True):
            folders[side] = folder_of(name, os.path.join(temporary, side))
            say(f"{side}: {name} {commit_of(folders[side])}")
        try:
            measure(chosen, folders, args.rounds, 60 * args.minutes)
        except KeyboardInterrupt:
            say("interrupted")
    misses = report(chosen, args.rounds)
    busy = max(case.busy for case in chosen.values())
    print(f"Before the runs, others used up to {busy:.0%} of the processors.\n")
    _program.end(
        {
            "limit": LIMIT,
            "ratios": {
                f"{name}, {figure}": [round(r, 4) for r in ratios]
                for name, case in chosen.items()
                for figure, ratios in case.ratios().items()
            },
            "busy": busy,
            "machine": _program.machine(),
        },
        misses,
    )


def check_possible():
    """Ends the program where there can be no emulated cluster."""
    try:
        with Cluster(1):
            pass
    except ClusterError as error:
        sys.exit(f"before_after.py: {error}")


def folder_of(name, temporary):
    """A checkout's folder: `name` itself, or the files of that commit."""
    if not os.path.isdir(name):
        os.makedirs(temporary)
        archive = subprocess.run(
            ["git", "-C", _ROOT, "archive", name], stdout=subprocess.PIPE
        )
        if archive.returncode:
            sys.exit(f"before_after.py: {name} is no folder and no commit.")
        subprocess.run(
            ["tar", "-x", "-C", temporary], input=archive.stdout, check=True
        )
        name = temporary
    folder = os.path.abspath(name)
    if not os.path.isfile(os.path.join(folder, "keras_sparsity/__init__.py")):
        sys.exit(f"before_after.py: there is no keras_sparsity in {folder}.")
    return folder


def commit_of(folder):
    described = subprocess.run(
        ["git", "-C", folder, "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
    )
    return described.stdout.strip()


# Rounds.


def measure(chosen, folders, least_rounds, most_seconds):
    """Runs the cases in turn, until their ratios are known or time is up."""
    begin, number = time.monotonic(), 0
    while number < _MOST_ROUNDS:
        left = {
            name: case
            for name, case in chosen.items()
            if len(case.found["old"]) < least_rounds
        }
        if number >= 2 * least_rounds:
            left = {}  # Such programs always fail.
        cost = _seconds(left) * max(1, least_rounds - number)
        if not left:
            left = {n: c for n, c in chosen.items() if c.is_undecided()}
            cost = _seconds(left)
            if time.monotonic() - begin + cost > most_seconds:
                return
        if not left:
            return
        say(
            f"round {number + 1}, at least {least_rounds}: {', '.join(left)}; "
            f"about {math.ceil(cost / 60)} min to go"
        )
        for name, case in left.items():
            run_pair(name, case, folders, number)
        number += 1


def _seconds(of):
    return sum(2 * case.seconds for case in of.values())


def run_pair(name, case, folders, number):
    """Runs one case of both checkouts; keeps the figures if both have them."""
    found, begin = {}, time.monotonic()
    for side in _SIDES[:: -1 if number % 2 else 1]:
        others = _network.busy_share()
        if others > _BUSY:
            say(f"  others use {others:.0%} of the processors")
        case.busy = max(case.busy, others)
        try:
            programs = folders["new" if case.is_of_new else side]
            figures, output = run(case.arguments, folders[side], programs)
            found[side] = case.step_seconds(figures)
        except subprocess.TimeoutExpired:
            say(f"  {name}, {side}: still running after {_TIMEOUT_SECONDS} s")
        except (KeyError, ZeroDivisionError):
            say(f"  {name}, {side}: no figures\n{_tail(output)}")
    case.seconds = (time.monotonic() - begin) / 2
    if len(found) < len(_SIDES) or found["old"].keys() != found["new"].keys():
        say(f"  {name}: failed; run again in the next round")
        return
    for side, figures in found.items():
        case.found[side].append(figures)
    ratios = ", ".join(
        f"{figure} {ratios[-1]:.3f}" for figure, ratios in case.ratios().items()
    )
    say(f"  {name} ({2 * case.seconds:.0f} s): new / old {ratios}")


def run(arguments, folder, programs):
    """Runs a program with a checkout's library.

    Args:
        arguments: the program, from the root of its checkout, and arguments.
        folder: the checkout of the library.
        programs: that of the program.

    Returns:
        Its last line and its output.
    """
    script, *arguments = arguments
    program = subprocess.Popen(
        [sys.executable, os.path.join(programs, script), *arguments],
        cwd=folder,
        env={
            **os.environ,
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            # Ahead of an installed library.
            "PYTHONPATH": folder,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # The terminal's Ctrl-C reaches this process alone.
        start_new_session=True,
    )
    try:
        output, _ = program.communicate(timeout=_TIMEOUT_SECONDS)
    finally:
        if program.poll() is None:
            # It ends its own processes.
            program.terminate()
            try:
                program.wait(_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                program.kill()
                program.wait()
    return _last_json(output), output


def _last_json(output):
    """The last line that is a JSON object: misses may follow it."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            return _program.last_json(line)
    return {}


def _tail(output):
    return "\n".join(f"    {line}" for line in output.splitlines()[-20:])


# Results.


def report(chosen, least_rounds):
    """Prints a table; returns a sentence for each figure over the limit."""
    rows, misses = [], []
    for name, case in chosen.items():
        if len(case.found["old"]) < least_rounds:
            rounds = len(case.found["old"])
            misses.append(f"{name}: {rounds} of {least_rounds} rounds measured")
        for figure, ratios in case.ratios().items():
            ratio, error = median_and_error(ratios)
            rows.append(
                [
                    f"{name}, {figure}",
                    *(
                        _milliseconds(case.found[side], figure)
                        for side in _SIDES
                    ),
                    f"{ratio:.3f} ± {error:.3f}",
                    f"{min(ratios):.3f} to {max(ratios):.3f}",
                    str(len(ratios)),
                ]
            )
            if ratio > LIMIT and not figure.startswith(CONTROL):
                misses.append(
                    f"{name}, {figure}: {ratio:.3f} ± {error:.3f} times as "
                    f"long, at most {LIMIT} asked"
                )
    head = ["", "old, ms", "new, ms", "new / old", "spread", "rounds"]
    print(_report.table("Milliseconds of a step", head, rows))
    return misses


def _milliseconds(rounds, figure):
    if "/ stock" in figure:
        return None  # in terms of stock Keras
    return 1e3 * statistics.median(of_round[figure] for of_round in rounds)


def median_and_error(ratios):
    """The median and its standard error, infinite for a single ratio."""
    if len(ratios) < 2:
        return ratios[0], math.inf
    error = _OF_MEDIAN * statistics.stdev(ratios) / math.sqrt(len(ratios))
    return statistics.median(ratios), error


def say(line):
    """Progress, apart from the results."""
    print(line, file=sys.stderr, flush=True)


def parse_arguments():
    has_horovod = importlib.util.find_spec("horovod") is not None
    parser = _program.parser(__doc__)
    add = parser.add_argument
    add("old", help="a folder or a commit")
    add("new", nargs="?", default=_ROOT, help="by default this checkout")
    add("--cases", nargs="+", choices=list(cases("")), default=list(cases("")))
    add("--rounds", type=int, default=3, help="at least; 2 or more")
    add("--minutes", type=float, default=15, help="for further rounds")
    add("--engine", default="horovod" if has_horovod else "native")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds must be 2 or more. Received: {args.rounds}.")
    return args


if __name__ == "__main__":
    main()
