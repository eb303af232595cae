"""How training scales on an emulated cluster, beside what people would use.

Each training is a run of its own on network namespaces with a limited rate
(`cluster.py`), one after the other. Sets of runs answer one question each, with
tables in Markdown and, with `--plots`, PNG files. What a run has given is kept
in the file of `--results`, and not run again: end the program when you like,
and start it again. A run that fails is a miss, and the others go on. Lines of
other sizes of a workload do not count, nor, but with `--report`, those of other
versions of this library, TensorFlow or Keras; both are said.

    python benchmarks/scaling.py                        # a few minutes
    python benchmarks/scaling.py --set speed --results runs.jsonl
    python benchmarks/scaling.py --set all --results runs.jsonl --plots plots

Needs root, as `cluster.py` does, and Horovod. README.md says what is asked, and
how the bound of `--set bound` is derived.
"""

import argparse
import importlib.util
import os
import signal
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import _report
import _timing
from _namespaces import ClusterError
from _runs import WORKLOADS, Results
from cluster import Cluster
from sets import SETS


def main():
    options = parse_arguments()
    # A run that is ended has much to put away.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    names = list(SETS) if "all" in options.set else options.set
    plots = _report.Plots(options.plots)
    results = Results(options.results, of_any_version=options.report)
    runs = {name: SETS[name].runs(options) for name in names}
    if options.estimate:
        for name, of_set in runs.items():
            print(f"{name}: {results.left_to_do(of_set)}")
        print(f"together: {results.left_to_do(sum(runs.values(), []))}")
        return
    if not options.report:
        check_possible()
        try:
            results.run_all(sum(runs.values(), []), options.timeout)
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)
    figures, misses = report(names, options, results, plots)
    _timing.finish(figures, misses)


def report(names, options, results, plots):
    """Prints and plots; returns figures and misses of all sets."""
    figures, misses = {}, []
    for name in names:
        found = SETS[name].report(options, results.get, plots)
        print(*found.tables, sep="\n", flush=True)
        figures[name] = found.figures
        misses += [f"{name}: {miss}" for miss in found.misses]
        runs = dict.fromkeys(SETS[name].runs(options))
        failed = [run for run in runs if results.get(run) is None]
        for run in failed:
            misses.append(f"{name}: {run}: {results.why_missing(run)}")
        busy = [f["busy_before"] for f in map(results.get, runs) if f]
        if busy:
            print(f"Measured with {results.versions_of(runs)}.")
            print(
                "Of the processors others had, just before each run, "
                f"{min(busy):.0%} to {max(busy):.0%}.\n"
            )
    plots.save()
    return figures, misses


def check_possible():
    if importlib.util.find_spec("horovod") is None:
        sys.exit(
            "scaling.py: there is no Horovod here, which is measured beside "
            "this library: scripts/install_horovod.sh."
        )
    try:
        with Cluster(1):
            pass
    except ClusterError as error:
        sys.exit(f"scaling.py: {error}")


def parse_arguments():
    sets = "\n".join(f"  {name:12} {of.help}" for name, of in SETS.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nsets:\n{sets}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        *("--set", "-s"),
        nargs="+",
        choices=[*SETS, "all"],
        default=["quick"],
        help="which, in this order",
    )
    add("--results", metavar="FILE", help="JSON lines, kept and gone on with")
    add("--plots", metavar="FOLDER", help="for PNG files")
    add("--report", action="store_true", help="run nothing, say what is known")
    add("--estimate", action="store_true", help="say how long it may take")
    add("--machines", type=int, nargs="+", default=[1, 2, 4, 8])
    add("--rates", type=float, nargs="+", help="Mbit/s; by default the set's")
    add("--workloads", nargs="+", choices=list(WORKLOADS))
    add("--engine", default="horovod", help="this library's")
    add("--size", default="large", help="of the workloads")
    add("--steps", type=int, help="that count; by default 2 to 40")
    add("--warm-up", type=int, help="steps before them")
    add("--timeout", type=float, default=3600, help="seconds of a run")
    add(
        "--arguments",
        nargs=argparse.REMAINDER,
        default=[],
        help="all that follow are the workload's own",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
