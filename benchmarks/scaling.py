"""Training on an emulated cluster, compared with other ways to train.

Each run trains one workload in one way on `cluster.py`. Sets of runs answer one
question each, with tables in Markdown and, with `--plots`, PNG files. The file
of `--results` keeps the figures; a run in it is not repeated, so a set may be
interrupted and resumed. Failed runs are reported, counted as misses and
retried. Lines of other sizes of a workload do not count, nor, except in
`--report`, lines of other versions of this library, TensorFlow or Keras; the
program reports both.

    python benchmarks/scaling.py                        # a few minutes
    python benchmarks/scaling.py --set speed --results runs.jsonl
    python benchmarks/scaling.py --set all --results runs.jsonl --plots plots

Needs root, as `cluster.py` does, and Horovod. `--publish` writes
results/README.md, which has each set's limits.
"""

import argparse
import importlib.util
import signal
import sys

import _page
import _program
import _report
from _namespaces import ClusterError
from _results import Results
from _runs import WORKLOADS
from cluster import Cluster
from sets import SETS, report_of


def main():
    options = parse_arguments()
    if options.publish:
        _page.publish(parse_arguments)
        return
    # A cluster cleans up when the program exits.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    names = list(SETS) if "all" in options.set else options.set
    plots = _report.Plots(options.plots)
    results = Results(options.results, for_report=options.report)
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
    _program.finish(figures, misses)


def report(names, options, results, plots):
    """Prints and plots; returns figures and misses of all sets."""
    figures, misses = {}, []
    for name in names:
        found = report_of(name, options, results, plots)
        print(*found.tables, sep="\n", flush=True)
        figures[name] = found.figures
        misses += [f"{name}: {miss}" for miss in found.misses]
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


def parse_arguments(arguments=None):
    sets = "\n".join(f"  {name:12} {of.help}" for name, of in SETS.items())
    parser = _program.parser(f"{__doc__}\nsets:\n{sets}")
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
    add("--report", action="store_true", help="run nothing")
    add("--publish", action="store_true", help="write results/README.md")
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
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
