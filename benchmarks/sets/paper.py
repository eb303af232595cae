"""The paper's tables and plots, with its figures beside them."""

import _traffic
from _runs import WORKLOADS

from sets.base import (
    BOTH,
    SLOW,
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
# Asked: of words/s on the most machines in terms of those on the fewest of
# several; of hybrid in terms of each other architecture, which may be as fast
# where nearly all is sparse; of each thing that is switched on in terms of what
# was before it, where the network is slowest, and of all of them in terms of
# naive servers; and of hybrid in terms of all others, however sparse.
ASKED_OF_MORE_MACHINES = 1.0
ASKED_OF_PEERS = 1.0
ASKED_OF_HYBRID = 0.97
ASKED_OF_EACH_STEP = 0.9
ASKED_OF_ALL_STEPS = 1.5
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
        _over_machines_of(report, options, figures_of, plots, workload)
    return report


def _over_machines_of(report, options, figures_of, plots, workload):
    machines, rows = sorted(options.machines), []
    several, unit = [n for n in machines if n > 1], WORKLOADS[workload][0]
    axes = f"{unit}/s", "normalised", "MB a machine and step"
    for rate in rates_of(options):
        where = f"{workload}, {at_rate(rate)}"
        lines = [{} for _ in axes]
        for way in (*BOTH, "horovod"):
            runs = _over_machines(options, workload, way, rate)
            found = {run.machines: figures_of(run) for run in runs}
            found = {n: figures for n, figures in found.items() if figures}
            if not found:
                continue
            words = {n: words_of(figures) for n, figures in found.items()}
            first = min(words)
            scaling = {n: first * w / words[first] for n, w in words.items()}
            carried = {
                n: sent_and_received(figures)
                for n, figures in found.items()
                if n > 1
            }
            row = [f"{at_rate(rate)}, {way}"]
            row += map(words.get, machines)
            row += [of.get(n) for of in (scaling, carried) for n in several]
            rows.append(row)
            for line, of in zip(lines, (words, scaling, carried), strict=True):
                line[way] = list(of.items())
            for n, w in words.items():
                report.figures[f"{where}, {way}, {n}"] = w
            if len(carried) > 1:
                report.check(
                    f"{where}, {way}: {max(carried)} / {min(carried)} machines",
                    words[max(carried)] / words[min(carried)],
                    least=ASKED_OF_MORE_MACHINES if way in BOTH else None,
                )
        _check_peers(report, where, lines[0], several)
        for axis, line in zip(axes, lines, strict=True):
            plots.lines(f"machines {workload}", where, ("machines", axis), line)
    report.table(
        f"{workload}: {unit}/s on so many machines, normalised by the fewest "
        "ones', and MB that a machine sends and receives in a step",
        [
            "",
            *(f"{unit}/s, {n}" for n in machines),
            *(f"normalised, {n}" for n in several),
            *(f"MB, {n}" for n in several),
        ],
        rows,
    )


def _check_peers(report, where, lines, machines):
    """Of each of these numbers of machines: this library and Horovod's way."""
    words = {way: dict(line) for way, line in lines.items()}
    for n in machines:
        for way in BOTH:
            ours, theirs = (words.get(w, {}).get(n) for w in (way, "horovod"))
            report.check(
                f"{where}, {n} machines: {way} / horovod",
                ours / theirs if ours and theirs else None,
                least=ASKED_OF_PEERS,
            )


# EuroSys Table 4, and the cumulative table of the arXiv version.

# The paper has all but the last.
_TABLE_4 = ("allreduce", "naive ps", "ps", "hybrid", "hybrid, prefetch")
# Where the operations run that need all of a gradient (EuroSys 4.3): with the
# owners of rows, who tell each other one number, or with every worker, whom all
# owners send their gradients to.
_CLIPPED = ("hybrid", "hybrid, clipped", "hybrid, clipped by workers")
_CUMULATIVE = {
    "base: naive servers": "naive ps",
    "+ each row once, few messages": "ps, no local aggregation",
    "+ hybrid": "hybrid, no local aggregation",
    "+ local aggregation": "hybrid",
    "+ cast to bfloat16 at the sender": "hybrid bfloat16",
}
# What of Table 4 stands beside them: the optimized servers and Parallax do
# aggregate locally.
_PAPER_CUMULATIVE = {
    "base: naive servers": "naive ps",
    "+ local aggregation": "hybrid",
}


def _ablation_runs(options):
    runs = [
        run
        for workload in workloads_of(options, ("lm", "nmt"))
        for rate in rates_of(options)
        for runs_of in (_architectures, _cumulative, _clipped)
        for run in runs_of(options, workload, rate).values()
    ]
    return list(dict.fromkeys(runs))


def _architectures(options, workload, rate):
    return {way: make_run(options, workload, way, rate) for way in _TABLE_4}


def _cumulative(options, workload, rate):
    machines = min(4, max(options.machines))
    return {
        step: make_run(options, workload, way, rate, machines, processes=2)
        for step, way in _CUMULATIVE.items()
    }


def _clipped(options, workload, rate):
    return {way: make_run(options, workload, way, rate) for way in _CLIPPED}


def _ablation(options, figures_of, plots):
    report = Report()
    for workload in workloads_of(options, ("lm", "nmt")):
        for name, runs_of, base, title, check in (
            (
                *("architectures", _architectures, "naive ps"),
                *(f"{max(options.machines)} machines", _check_hybrid),
            ),
            (
                *("cumulative", _cumulative, next(iter(_CUMULATIVE))),
                "machines of 2 processes, one thing after the other",
                _check_steps,
            ),
            (
                *("clipped", _clipped, "hybrid, clipped by workers"),
                *("operations after aggregation", _check_clipped),
            ),
        ):
            found = {
                rate: {
                    label: figures_of(run)
                    for label, run in runs_of(options, workload, rate).items()
                }
                for rate in rates_of(options)
            }
            title = f"{workload}, {title}"
            _compare(report, title, found, base, workload)
            for rate, of_rate in found.items():
                words = {label: words_of(f) for label, f in of_rate.items()}
                check(report, f"{title}, {at_rate(rate)}", words, rate)
                bars = {label: words_of(f) for label, f in of_rate.items() if f}
                where = f"{workload}, {at_rate(rate)}"
                plots.bars(f"{name} {workload}", where, "words/s", bars)
    return report


def _compare(report, title, found, base, workload):
    """A table of what is there at each rate, in terms of one of them."""
    rates, paper = list(found), PAPER_WORDS.get(workload, {})
    rows = []
    for label in found[rates[0]]:
        of_label = [found[rate][label] for rate in rates]
        row = [label]
        for rate, figures in zip(rates, of_label, strict=True):
            ratio = words_ratio(figures, found[rate][base])
            row += [words_of(figures), ratio]
            report.check(f"{title}, {at_rate(rate)}: {label}", row[-2])
        of_paper = _PAPER_CUMULATIVE.get(label, label)
        if of_paper in paper:
            row.append(paper[of_paper] / paper["naive ps"])
        else:
            row.append(None)
        rows.append([*row, sent_and_received(of_label[-1])])
    report.table(
        f"{title}; in terms of {base.removeprefix('base: ')}, beside EuroSys "
        "Table 4 (words/s in terms of naive servers, 8 machines of 6 GPUs)",
        [
            "",
            *(f"{a}{at_rate(r)}" for r in rates for a in ("words/s, ", "/, ")),
            *("the paper's /", "MB"),
        ],
        rows,
    )


def _ratio(words, label, of):
    """None where one of the two has not been measured, which is a miss."""
    mine, others = words.get(label), words.get(of)
    return mine / others if mine and others else None


def _check_hybrid(report, where, words, rate):
    for other in ("allreduce", "naive ps", "ps"):
        report.check(
            f"{where}: hybrid / {other}",
            _ratio(words, "hybrid", other),
            least=ASKED_OF_HYBRID,
        )


def _check_steps(report, where, words, rate):
    labels = list(_CUMULATIVE)
    for before, label in zip(labels[:-1], labels[1:], strict=True):
        report.check(
            f"{where}: {label} / {before}",
            _ratio(words, label, before),
            least=ASKED_OF_EACH_STEP if rate == SLOW else None,
        )
    report.check(
        f"{where}: all / {labels[0]}",
        _ratio(words, labels[-1], labels[0]),
        least=ASKED_OF_ALL_STEPS,
    )


def _check_clipped(report, where, words, rate):
    report.check(
        f"{where}: by owners / by workers",
        _ratio(words, *_CLIPPED[1:]),
        least=ASKED_OF_PEERS,
    )


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
            for peer in _SWEEP_WAYS[1:]:
                report.check(
                    f"{time} words, {at_rate(rate)}: hybrid / {peer}",
                    words_ratio(ours, found[peer]),
                    least=ASKED_OF_PEERS,
                )
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
