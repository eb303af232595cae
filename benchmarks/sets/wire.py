"""How close to the wire: bytes, local aggregation, the step's bound."""

import _traffic

from sets.base import (
    BOTH,
    QUIET_CYCLE,
    Report,
    Set,
    at_rate,
    in_pairs,
    make_run,
    megabytes,
    rates_of,
    sparse_workloads,
)

# Most sparse bytes without indices / 4 alpha w (N-1)/N with float32.
ASKED_BYTES = {
    ("horovod", "hybrid"): 1.05,
    ("horovod", "hybrid bfloat16"): 0.55,
    ("native", "hybrid"): 1.4,
    ("native", "hybrid bfloat16"): 0.75,
}
ASKED_OF_BOUND = 0.85
ASKED_OF_OVERLAP = 0.05
# Milliseconds. With a cycle of 20, the idle traffic of eight processes, larger
# than while they train, was 5 to 9 % at 50 Mbit/s: too much for a difference.
_QUIETEST_CYCLE = 100


# How close to the wire.


def _bytes_runs(options):
    return [
        _bytes_run(options, workload, way, engine, rate)
        for rate in rates_of(options)
        for workload in sparse_workloads(options)
        for engine, way in ASKED_BYTES
    ]


def _bytes_run(options, workload, way, engine, rate):
    return make_run(
        options, workload, way, rate, engine=engine, cycle=QUIET_CYCLE
    )


def _bytes(options, figures_of, plots):
    report = Report()
    rows = []
    for rate in rates_of(options):
        for workload in sparse_workloads(options):
            for (engine, way), most in ASKED_BYTES.items():
                figures = figures_of(
                    _bytes_run(options, workload, way, engine, rate)
                )
                name = f"{workload}, {way}, {engine}, {at_rate(rate)}"
                ratio = figures and _traffic.row_ratio(figures)
                report.check(name, ratio, most=most)
                if figures is None:
                    continue
                parts = [
                    _traffic.carried_bytes(figures),
                    _traffic.carried_bytes(figures, payload=True),
                    _traffic.dense_bytes(figures),
                    _traffic.index_bytes(figures),
                    _traffic.row_bytes(figures),
                ]
                rows.append([name, *map(megabytes, parts), ratio, most])
    report.table(
        f"MB that a machine sends and receives in a step, "
        f"{max(options.machines)} machines",
        [
            "",
            "counted",
            "without headers",
            "dense",
            "indices",
            "4 alpha w m (N-1)/N",
            "ratio",
            "asked",
        ],
        rows,
    )
    return report


# Local aggregation.


def _aggregation_runs(options):
    return [
        run
        for workload in sparse_workloads(options)
        for rate in rates_of(options)
        for run in _with_and_without(options, workload, rate)
    ]


def _with_and_without(options, workload, rate):
    return [
        make_run(
            options,
            workload,
            way,
            rate,
            min(4, max(options.machines)),
            processes=2,
            cycle=_QUIETEST_CYCLE,
        )
        for way in ("hybrid", "hybrid, no local aggregation")
    ]


def _aggregation(options, figures_of, plots):
    report = Report()
    rows = []
    for run, without in in_pairs(_aggregation_runs(options)):
        on, off = figures_of(run), figures_of(without)
        name = f"{run.workload}, {at_rate(run.rate)}"
        if on is None or off is None:
            report.check(name, None)
            continue
        counted = _traffic.as_counted_in_the_data(on)
        planned = [
            _traffic.row_bytes(counted, together=together)
            + _traffic.index_bytes(counted, together=together)
            for together in (True, False)
        ]
        measured = [_traffic.sparse_bytes(figures) for figures in (on, off)]
        cut, predicted = (1 - a / b for a, b in (measured, planned))
        error = cut / predicted - 1
        report.check(f"{name}: cut", cut)
        report.check(f"{name}: predicted", predicted)
        report.check(f"{name}: error", abs(error), most=ASKED_OF_OVERLAP)
        rows.append(
            [
                name,
                *map(megabytes, measured[::-1]),
                f"{cut:.1%}",
                f"{predicted:.1%}",
                f"{error:+.1%}",
            ]
        )
    report.table(
        "Sparse MB that a machine sends and receives in a step, machines of 2 "
        "processes",
        ["", "each alone", "together", "cut", "predicted", "off"],
        rows,
    )
    return report


# The bound.


def _bound_runs(options):
    return [
        make_run(options, workload, way, rate)
        for rate in rates_of(options)
        for workload in sparse_workloads(options)
        for way in (*BOTH, "hybrid, prefetch")
    ]


def _bound(options, figures_of, plots):
    report = Report()
    rows = []
    for run in _bound_runs(options):
        figures = figures_of(run)
        name = f"{run.workload}, {run.way}, {at_rate(run.rate)}"
        if figures is None:
            report.check(name, None)
            continue
        # A step sends the same bytes at each rate; a short one has the least
        # idle traffic to subtract, which may be too much.
        fastest = figures_of(
            make_run(options, run.workload, run.way, max(rates_of(options)))
        )
        parts = _traffic.step_bound(
            figures, _traffic.busiest_bytes(fastest or figures)
        )
        step = figures["seconds"] / figures["steps"]
        share = parts["bound"] / step
        report.check(name, share, least=ASKED_OF_BOUND)
        rows.append(
            [
                name,
                *(
                    1e3 * seconds
                    for seconds in (
                        parts["alone"],
                        parts["network"],
                        parts["chain"],
                        parts["bound"],
                        step,
                    )
                ),
                share,
            ]
        )
    report.table(
        f"Milliseconds of a step, {max(options.machines)} machines",
        ["", "alone", "bytes / rate", "chain", "bound", "step", "bound / step"],
        rows,
    )
    return report


BYTES = Set("sparse bytes against the least", _bytes_runs, _bytes)
AGGREGATION = Set(
    "machines of two processes that pull and push together",
    _aggregation_runs,
    _aggregation,
)
BOUND = Set("the step's time against the least", _bound_runs, _bound)
