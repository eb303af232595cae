"""Sets of trainings on an emulated cluster: runs, tables, limits.

A set has a function from the options to its runs, and one that makes a `Report`
of their figures. Machines, rates and workloads come from the command line, or
else from the set.
"""

from sets import paper, speed, target, wire

SETS = {
    "quick": speed.QUICK,
    "speed": speed.SPEED,
    "others": speed.OTHERS,
    "bytes": wire.BYTES,
    "aggregation": wire.AGGREGATION,
    "bound": wire.BOUND,
    "machines": paper.MACHINES,
    "ablation": paper.ABLATION,
    "sweep": paper.SWEEP,
    "target": target.TARGET,
}


def report_of(name, options, results, plots):
    """The `Report` of a set, with its missing runs.

    Args:
        name: of the set.
        options: of `scaling.py`.
        results: `_runs.Results`.
        plots: `_report.Plots`.
    """
    report = SETS[name].report(options, results.get, plots)
    runs = dict.fromkeys(SETS[name].runs(options))
    for run in runs:
        if results.get(run) is None:
            report.missing.append(f"{run}: {results.why_missing(run)}")
    busy = [f["busy_before"] for f in map(results.get, runs) if f]
    if busy:
        report.tables.append(
            f"Measured with {results.versions_of(runs)}; just before the runs, "
            f"others used {min(busy):.0%} to {max(busy):.0%} of the "
            "processors.\n"
        )
    return report
