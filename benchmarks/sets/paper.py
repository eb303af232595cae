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
# Least ratios of words/s: the most machines / the fewest of several; hybrid /
# Horovod's way, and / naive servers at any sparsity; hybrid / each other
# architecture, which may be as fast where nearly all is sparse; each row of the
# cumulative table / the row before, at the slowest rate, and the last / the
# first.
ASKED_OF_MORE_MACHINES = 1.0
ASKED_OF_PEERS = 1.0
ASKED_OF_HYBRID = 0.97
ASKED_OF_EACH_STEP = 0.9
ASKED_OF_ALL_STEPS = 1.5
# Words of an instance; the longest ones touch nearly all of these few rows.
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
            words, scaling, carried = curves = _curves(found)
            row = [f"{at_rate(rate)}, {way}"]
            row += map(words.get, machines)
            row += [of.get(n) for of in (scaling, carried) for n in several]
            rows.append(row)
            for line, curve in zip(lines, curves, strict=True):
                line[way] = list(curve.items())
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


def _curves(found):
    """Words/s, normalised words/s and MB, by the number of machines."""
    words = {n: words_of(figures) for n, figures in found.items()}
    first = min(words)
    return (
        words,
        {n: first * w / words[first] for n, w in words.items()},
        {n: sent_and_received(f) for n, f in found.items() if n > 1},
    )


def _check_peers(report, where, lines, machines):
    """This library / Horovod's way, on each of these numbers of machines."""
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

# All but the last are the paper's.
_TABLE_4 = ("allreduce", "naive ps", "ps", "hybrid", "hybrid, prefetch")
# Operations on all of a gradient (EuroSys 4.3) run at the owners of rows, which
# exchange one number, or at every worker, to which owners send their gradients.
_CLIPPED = ("hybrid", "hybrid, clipped", "hybrid, clipped by workers")
_CUMULATIVE = {
    "base: naive servers": "naive ps",
    "+ each row once, few messages": "ps, no local aggregation",
    "+ hybrid": "hybrid, no local aggregation",
    "+ local aggregation": "hybrid",
    "+ cast to bfloat16 at the sender": "hybrid bfloat16",
}
_BESIDE_PAPER = (
    ", beside EuroSys Table 4 (words/s in terms of naive servers, 8 machines "
    "of 6 GPUs)"
)
# Their counterparts in Table 4, where optimized servers and Parallax aggregate
# locally.
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
                if len(bars) > 1:
                    plots.bars(f"{name} {workload}", where, "words/s", bars)
    return report


def _compare(report, title, found, base, workload):
    """A table of the ways at each rate, in terms of one of them.

    The paper's words/s stand beside it if that one is naive servers.
    """
    is_papers = _PAPER_CUMULATIVE.get(base, base) == "naive ps"
    rates = list(found)
    paper = PAPER_WORDS.get(workload, {}) if is_papers else {}
    rows, has_base = [], any(found[rate][base] for rate in rates)
    for label in found[rates[0]]:
        of_label = [found[rate][label] for rate in rates]
        row = [label]
        for rate, figures in zip(rates, of_label, strict=True):
            ratio = words_ratio(figures, found[rate][base])
            row += [words_of(figures), ratio]
            report.check(f"{title}, {at_rate(rate)}: {label}", row[-2])
        if is_papers:
            of_paper = paper.get(_PAPER_CUMULATIVE.get(label, label))
            row.append(of_paper / paper["naive ps"] if of_paper else None)
        if has_base and any(of_label):
            rows.append([*row, sent_and_received(of_label[-1])])
    report.table(
        f"{title}; in terms of {base.removeprefix('base: ')}"
        + (_BESIDE_PAPER if is_papers else ""),
        [
            "",
            *(f"{a}{at_rate(r)}" for r in rates for a in ("words/s, ", "/, ")),
            *(["the paper's /"] if is_papers else []),
            "MB",
        ],
        rows,
    )


def _ratio(words, label, of):
    """None, a miss, where one of the two is not measured."""
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
            alpha = found["hybrid"] and _traffic.alpha_model(found["hybrid"])
            for way, figures in found.items():
                if alpha and figures:
                    lines[way].append((alpha, words_of(figures)))
            ratios = _check_sweep(
                report, f"{time} words, {at_rate(rate)}", found
            )
            row = [str(time), alpha, *map(words_of, found.values()), *ratios]
            rows.append([*row, paper[0], paper[1] / paper[2]])
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
        axes = "alpha of the model", "words/s"
        plots.lines("sparsity", f"lm, {at_rate(rate)}", axes, lines, True)
    return report


def _check_sweep(report, where, found):
    """Words/s of hybrid / those of each other way."""
    ratios = []
    for way, figures in found.items():
        report.check(f"{where}: {way}", words_of(figures))
        if way != "hybrid":
            ratios.append(words_ratio(found["hybrid"], figures))
            name = f"{where}: hybrid / {way}"
            report.check(name, ratios[-1], least=ASKED_OF_PEERS)
    return ratios


MACHINES = Set(
    "1, 2, 4, 8 machines (EuroSys Figures 8, 9)", _machines_runs, _machines
)
ABLATION = Set(
    "one thing after the other (EuroSys Table 4)", _ablation_runs, _ablation
)
SWEEP = Set("by sparsity (EuroSys Table 6)", _sweep_runs, _sweep)
