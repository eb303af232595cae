"""The paper's tables and plots, with its figures beside them."""

import _traffic
from _runs import WORKLOADS

from sets.base import (
    BOTH,
    Report,
    Set,
    at_rate,
    make_run,
    rates_of,
    sent_and_received,
    words_of,
    words_ratio,
    workloads_of,
)

# EuroSys Table 4, words/s on 8 machines of 6 GPUs.
PAPER_WORDS = {
    "lm": {
        "allreduce": 45_500,
        "naive ps": 98_900,
        "ps": 250_000,
        "hybrid": 274_000,
    },
    "nmt": {
        "allreduce": 68_300,
        "naive ps": 102_000,
        "ps": 116_000,
        "hybrid": 204_000,
    },
}
# EuroSys Table 6, from the shortest instances to the longest: alpha of the
# model, thousands of words/s of Parallax and of TensorFlow's servers.
PAPER_SWEEP = (
    (0.04, 82, 24),
    (0.07, 285, 94),
    (0.1, 480, 159),
    (0.16, 557, 193),
    (0.28, 536, 221),
    (0.52, 511, 219),
    (1.0, 437, 214),
)
# Words of an instance. So few rows that the longest ones touch nearly all.
SWEEP_TIMES = (1, 4, 8, 15, 30, 60, 120)
SWEEP_OPTIONS = ("--vocabulary", "1000", "--dim", "512") + (
    *("--units", "16", "--sampled", "16"),
)


# EuroSys Figures 8 and 9.


def _machines_runs(options):
    return [
        run
        for workload in workloads_of(options, ("lm", "nmt"))
        for rate in rates_of(options)
        for way in (*BOTH, "horovod")
        for run in _over_machines(options, workload, way, rate)
    ]


def _over_machines(options, workload, way, rate):
    return [
        make_run(options, workload, way, rate, machines)
        for machines in sorted(options.machines)
    ]


def _machines(options, figures_of, plots):
    report = Report()
    for workload in workloads_of(options, ("lm", "nmt")):
        for rate in rates_of(options):
            _over_machines_of(
                report, options, figures_of, plots, workload, rate
            )
    return report


def _over_machines_of(report, options, figures_of, plots, workload, rate):
    rows, words, scaling, carried = [], {}, {}, {}
    for way in (*BOTH, "horovod"):
        runs = _over_machines(options, workload, way, rate)
        found = [(run.machines, figures_of(run)) for run in runs]
        found = [(n, figures) for n, figures in found if figures]
        if not found:
            continue
        words[way] = [(n, words_of(figures)) for n, figures in found]
        first, least = found[0][0], words[way][0][1]
        scaling[way] = [(n, first * w / least) for n, w in words[way]]
        carried[way] = [(n, sent_and_received(f)) for n, f in found if n > 1]
        for (n, w), (_, s), (_, figures) in zip(
            words[way], scaling[way], found, strict=True
        ):
            moved = sent_and_received(figures)
            rows.append([way, str(n), w, s, moved])
            report.figures[f"{workload}, {at_rate(rate)}, {way}, {n}"] = w
    where, unit = f"{workload}, {at_rate(rate)}", WORKLOADS[workload][0]
    report.table(
        f"{where}: {unit}/s, in terms of the fewest machines', and MB that a "
        "machine sends and receives in a step",
        ["", "machines", f"{unit}/s", "scaling", "MB"],
        rows,
    )
    for axis, lines in (
        (f"{unit}/s", words),
        ("normalised", scaling),
        ("MB a machine and step", carried),
    ):
        plots.lines(f"machines {workload}", where, ("machines", axis), lines)


# EuroSys Table 4, and the cumulative table of the arXiv version.

# The paper has all but the last.
_TABLE_4 = ("allreduce", "naive ps", "ps", "hybrid", "hybrid, prefetch")
_CUMULATIVE = {
    "base: naive servers": "naive ps",
    "+ each row once, few messages": "ps, no local aggregation",
    "+ hybrid": "hybrid, no local aggregation",
    "+ local aggregation": "hybrid",
    "+ cast to bfloat16 at the sender": "hybrid bfloat16",
}


def _ablation_runs(options):
    return [
        run
        for workload in workloads_of(options, ("lm", "nmt"))
        for rate in rates_of(options)
        for run in (
            *(make_run(options, workload, way, rate) for way in _TABLE_4),
            *_cumulative(options, workload, rate),
        )
    ]


def _cumulative(options, workload, rate):
    machines = min(4, max(options.machines))
    return [
        make_run(options, workload, way, rate, machines, processes=2)
        for way in _CUMULATIVE.values()
    ]


def _ablation(options, figures_of, plots):
    report = Report()
    for workload in workloads_of(options, ("lm", "nmt")):
        for rate in rates_of(options):
            where = f"{workload}, {at_rate(rate)}"
            runs = [make_run(options, workload, way, rate) for way in _TABLE_4]
            found = dict(zip(_TABLE_4, map(figures_of, runs), strict=True))
            paper = PAPER_WORDS.get(workload, {})
            report.table(
                f"{where}, {max(options.machines)} machines, and EuroSys "
                "Table 4 (8 of 6 GPUs), in terms of AllReduce",
                ["", "words/s", "ratio", "the paper's", "MB"],
                [
                    [
                        way,
                        words_of(figures),
                        words_ratio(figures, found["allreduce"]),
                        paper[way] / paper["allreduce"]
                        if way in paper
                        else None,
                        sent_and_received(figures),
                    ]
                    for way, figures in found.items()
                ],
            )
            bars = {w: words_of(f) for w, f in found.items() if f}
            plots.bars(f"architectures {workload}", where, "words/s", bars)
            for way, figures in found.items():
                report.check(f"{where}: {way}", words_of(figures))
            _add_up(report, options, figures_of, plots, workload, rate)
    return report


def _add_up(report, options, figures_of, plots, workload, rate):
    where = f"{workload}, {at_rate(rate)}"
    found = dict(
        zip(
            _CUMULATIVE,
            map(figures_of, _cumulative(options, workload, rate)),
            strict=True,
        )
    )
    base = next(iter(found.values()))
    report.table(
        f"{where}, machines of 2 processes, one thing after the other",
        ["", "words/s", "ratio", "MB"],
        [
            [
                step,
                words_of(figures),
                words_ratio(figures, base),
                sent_and_received(figures),
            ]
            for step, figures in found.items()
        ],
    )
    for step, figures in found.items():
        report.check(f"{where}: {step}", words_of(figures))
    bars = {step: words_of(f) for step, f in found.items() if f}
    plots.bars(f"cumulative {workload}", where, "words/s", bars)


# EuroSys Table 6.

_SWEEP_WAYS = ("hybrid", "naive ps", "horovod")


def _sweep_runs(options):
    return [
        _sweep_run(options, way, time, rate)
        for rate in rates_of(options)
        for time in SWEEP_TIMES
        for way in _SWEEP_WAYS
    ]


def _sweep_run(options, way, time, rate):
    script = (*SWEEP_OPTIONS, "--time", str(time), *options.arguments)
    return make_run(options, "lm", way, rate, arguments=script)


def _sweep(options, figures_of, plots):
    report = Report()
    for rate in rates_of(options):
        rows, lines = [], {way: [] for way in _SWEEP_WAYS}
        for time, paper in zip(SWEEP_TIMES, PAPER_SWEEP, strict=True):
            found = {
                way: figures_of(_sweep_run(options, way, time, rate))
                for way in _SWEEP_WAYS
            }
            ours = found["hybrid"]
            alpha = ours and _traffic.alpha_model(ours)
            for way, figures in found.items():
                report.check(
                    f"{time} words, {at_rate(rate)}: {way}", words_of(figures)
                )
                if alpha and figures:
                    lines[way].append((alpha, words_of(figures)))
            rows.append(
                [
                    str(time),
                    alpha,
                    *map(words_of, found.values()),
                    words_ratio(ours, found["naive ps"]),
                    words_ratio(ours, found["horovod"]),
                    paper[0],
                    paper[1] / paper[2],
                ]
            )
        report.table(
            f"Words/s by sparsity, {at_rate(rate)}, {max(options.machines)} "
            "machines; EuroSys Table 6 beside it, in its order",
            [
                *("words of an instance", "alpha of the model", *_SWEEP_WAYS),
                *("/ naive ps", "/ horovod"),
                *("the paper's alpha", "Parallax / TF-PS"),
            ],
            rows,
        )
        plots.lines(
            "sparsity",
            f"lm, {at_rate(rate)}",
            ("alpha of the model", "words/s"),
            lines,
            logarithmic=True,
        )
    return report


MACHINES = Set(
    "1, 2, 4, 8 machines (EuroSys Figures 8, 9)", _machines_runs, _machines
)
ABLATION = Set(
    "one thing after the other (EuroSys Table 4)", _ablation_runs, _ablation
)
SWEEP = Set("by sparsity (EuroSys Table 6)", _sweep_runs, _sweep)
