"""What is asked of trainings on an emulated cluster: runs, tables, limits.

A set is a function of the options that names its runs, and one that makes a
`Report` of their figures. Machines, rates and workloads are those of the
command line, or else the set's own.
"""

import dataclasses
from collections.abc import Callable

import _report
import _traffic
from _runs import WORKLOADS, Run

RATES = (50, 200, 1000)
# At which the step of Horovod's own way is nearly all network.
SLOW = 50
# Horovod's processes talk in each cycle; where bytes are counted, less often.
QUIET_CYCLE = 20
BOTH = ("hybrid", "hybrid bfloat16")

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

# Words/s in terms of Horovod's own way, at 8 machines of 50 Mbit/s: with
# float32 on the wire; with 16 bits, and Horovod's fp16 compression.
ASKED_SPEED = {
    "lm": (4, 7),
    "nmt": (2.3, 4),
    "recommender": (4, 7),
    "resnet50": (0.98, None),
}
# And in terms of naive servers, of float32 both times.
ASKED_OF_NAIVE = {"hybrid": 1.5, "hybrid bfloat16": 2.8}
# Sparse bytes less indices, in terms of 4 alpha w (N-1)/N with float32.
ASKED_BYTES = {
    ("horovod", "hybrid"): 1.05,
    ("horovod", "hybrid bfloat16"): 0.55,
    ("native", "hybrid"): 1.4,
    ("native", "hybrid bfloat16"): 0.75,
}
ASKED_OF_BOUND = 0.85
ASKED_OF_OVERLAP = 0.05


class Report:
    """What a set has found.

    Attributes:
        tables: list of Markdown.
        figures: dict for the last line.
        misses: list of sentences.
    """

    def __init__(self):
        self.tables, self.figures, self.misses = [], {}, []

    def table(self, *table):
        self.tables.append(_report.table(*table))

    def check(self, name, value, least=None, most=None):
        """Keeps a figure, and whether it is what was asked."""
        if value is None:
            self.misses.append(f"{name}: not measured")
            return
        self.figures[name] = round(value, 4)
        if least is not None and value < least:
            self.misses.append(f"{name}: {value:.3f}, at least {least} asked")
        if most is not None and value > most:
            self.misses.append(f"{name}: {value:.3f}, at most {most} asked")


@dataclasses.dataclass(frozen=True)
class Set:
    """Runs that belong together.

    Attributes:
        help: what it is.
        runs: function of the options that gives a list of `Run`.
        report: function of the options, of a function from a `Run` to its
            figures or None, and of `_report.Plots`, that gives a `Report`.
    """

    help: str
    runs: Callable
    report: Callable


# What they have in common.


def _run(options, workload, way, rate, machines=None, **others):
    run = Run(
        workload,
        way,
        machines or max(options.machines),
        rate,
        **{
            "engine": options.engine,
            "size": options.size,
            "arguments": tuple(options.arguments),
            **others,
        },
    ).sized()
    return dataclasses.replace(
        run,
        steps=options.steps or run.steps,
        warm_up=options.warm_up or run.warm_up,
    )


def _rates(options, own=RATES):
    return options.rates or own


def _workloads(options, own):
    return options.workloads or own


def _words(figures):
    return figures and figures["words_per_second"]


def _ratio(figures, of):
    """Of words/s; None where a run has failed."""
    return _words(figures) / _words(of) if figures and of else None


def _at(rate):
    return f"{rate:g} Mbit/s"


def _megabytes(number):
    return None if number is None else number / 1e6


def _sent_and_received(figures):
    return figures and _megabytes(_traffic.carried_bytes(figures))


# One look.


def _quick_runs(options):
    return [
        _run(options, workload, way, rate, min(4, max(options.machines)))
        for workload in _workloads(options, ("lm",))
        for rate in _rates(options, (SLOW,))
        for way in ("hybrid", "horovod")
    ]


def _quick(options, figures_of, plots):
    report = Report()
    rows = []
    for ours, peer in _in_pairs(_quick_runs(options)):
        figures, others = figures_of(ours), figures_of(peer)
        ratio = _ratio(figures, others)
        rows.append(
            [
                f"{ours.workload}, {ours.machines} machines, {_at(ours.rate)}",
                _words(figures),
                _words(others),
                ratio,
                _sent_and_received(figures),
                _sent_and_received(others),
            ]
        )
        report.check(f"{ours.workload}, {_at(ours.rate)}", ratio, least=1)
    report.table(
        "Words/s, and MB that a machine sends and receives in a step",
        ["", "hybrid", "Horovod's way", "ratio", "MB", "MB, Horovod's way"],
        rows,
    )
    return report


def _in_pairs(runs):
    return zip(runs[::2], runs[1::2], strict=True)


# Against what people would use instead.


# TensorFlow's own servers, asynchronous: for comparison, and not judged.
_OF_SERVERS = ("lm", "nmt", "recommender")


def _speed_ways(workload):
    ways = ["hybrid", "horovod"]
    if ASKED_SPEED.get(workload, (None, None))[1]:
        ways += ["hybrid bfloat16", "horovod fp16"]
    ways += ["naive ps"] * (workload == "lm")
    return ways + ["tensorflow ps"] * (workload in _OF_SERVERS)


def _speed_runs(options):
    return [
        _run(options, workload, way, rate)
        for rate in _rates(options)
        for workload in _workloads(options, tuple(ASKED_SPEED))
        for way in _speed_ways(workload)
    ]


def _speed(options, figures_of, plots):
    report = Report()
    rows = []
    for rate in _rates(options):
        for workload in _workloads(options, tuple(ASKED_SPEED)):
            found = {
                way: figures_of(_run(options, workload, way, rate))
                for way in _speed_ways(workload)
            }
            pairs = [("hybrid", "horovod"), ("hybrid bfloat16", "horovod fp16")]
            asked = ASKED_SPEED.get(workload, (None, None))
            ratios = []
            for (ours, peer), least in zip(pairs, asked, strict=True):
                if ours not in found:
                    ratios.append(None)
                    continue
                ratios.append(_ratio(found[ours], found[peer]))
                report.check(
                    f"{workload}, {_at(rate)}: {ours} / {peer}",
                    ratios[-1],
                    least=least if rate == SLOW else None,
                )
            for ours, least in ASKED_OF_NAIVE.items():
                if "naive ps" in found:
                    report.check(
                        f"{workload}, {_at(rate)}: {ours} / naive ps",
                        _ratio(found[ours], found["naive ps"]),
                        least=least if rate == SLOW else None,
                    )
            columns = [way for pair in pairs for way in pair]
            columns += ["naive ps", "tensorflow ps"]
            rows.append(
                [
                    f"{workload}, {WORKLOADS[workload][0]}/s, {_at(rate)}",
                    *(_words(found.get(way)) for way in columns),
                    *ratios,
                ]
            )
    report.table(
        f"Against Horovod's own way, {max(options.machines)} machines",
        ["", *columns, "ratio, float32", "ratio, 16 bits"],
        rows,
    )
    return report


# How close to the wire.


def _bytes_runs(options):
    return [
        _bytes_run(options, workload, way, engine, rate)
        for rate in _rates(options, (200,))
        for workload in _sparse_workloads(options)
        for engine, way in ASKED_BYTES
    ]


def _sparse_workloads(options):
    return _workloads(options, ("lm", "nmt", "recommender"))


def _bytes_run(options, workload, way, engine, rate):
    return _run(options, workload, way, rate, engine=engine, cycle=QUIET_CYCLE)


def _bytes(options, figures_of, plots):
    report = Report()
    rows = []
    for rate in _rates(options, (200,)):
        for workload in _sparse_workloads(options):
            for (engine, way), most in ASKED_BYTES.items():
                figures = figures_of(
                    _bytes_run(options, workload, way, engine, rate)
                )
                name = f"{workload}, {way}, {engine}, {_at(rate)}"
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
                rows.append([name, *map(_megabytes, parts), ratio, most])
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
        for workload in _sparse_workloads(options)
        for rate in _rates(options, (SLOW,))
        for run in _with_and_without(options, workload, rate)
    ]


def _with_and_without(options, workload, rate):
    return [
        _run(
            options,
            workload,
            way,
            rate,
            min(4, max(options.machines)),
            processes=2,
            cycle=QUIET_CYCLE,
        )
        for way in ("hybrid", "hybrid, no local aggregation")
    ]


def _aggregation(options, figures_of, plots):
    report = Report()
    rows = []
    for run, without in _in_pairs(_aggregation_runs(options)):
        on, off = figures_of(run), figures_of(without)
        name = f"{run.workload}, {_at(run.rate)}"
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
                *map(_megabytes, measured[::-1]),
                f"{cut:.1%}",
                f"{predicted:.1%}",
                f"{error:+.1%}",
                _ratio(on, off),
            ]
        )
    report.table(
        "Sparse MB that a machine sends and receives in a step, machines of 2 "
        "processes",
        ["", "each alone", "together", "cut", "predicted", "off", "words/s"],
        rows,
    )
    return report


# The bound.


def _bound_runs(options):
    return [
        _run(options, workload, way, rate)
        for rate in _rates(options)
        for workload in _sparse_workloads(options)
        for way in BOTH
    ]


def _bound(options, figures_of, plots):
    report = Report()
    rows = []
    for run in _bound_runs(options):
        figures = figures_of(run)
        name = f"{run.workload}, {run.way}, {_at(run.rate)}"
        if figures is None:
            report.check(name, None)
            continue
        parts = _traffic.step_bound(figures)
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


# EuroSys Figures 8 and 9.


def _machines_runs(options):
    return [
        run
        for workload in _workloads(options, ("lm", "nmt"))
        for rate in _rates(options, (SLOW,))
        for way in (*BOTH, "horovod")
        for run in _over_machines(options, workload, way, rate)
    ]


def _over_machines(options, workload, way, rate):
    return [
        _run(options, workload, way, rate, machines)
        for machines in sorted(options.machines)
    ]


def _machines(options, figures_of, plots):
    report = Report()
    for workload in _workloads(options, ("lm", "nmt")):
        for rate in _rates(options, (SLOW,)):
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
        words[way] = [(n, _words(figures)) for n, figures in found]
        first, least = found[0][0], words[way][0][1]
        scaling[way] = [(n, first * w / least) for n, w in words[way]]
        carried[way] = [(n, _sent_and_received(f)) for n, f in found if n > 1]
        for (n, w), (_, s), (_, figures) in zip(
            words[way], scaling[way], found, strict=True
        ):
            moved = _sent_and_received(figures)
            rows.append([way, str(n), w, s, moved])
            report.figures[f"{workload}, {_at(rate)}, {way}, {n}"] = w
    where, unit = f"{workload}, {_at(rate)}", WORKLOADS[workload][0]
    report.table(
        f"{where}: {unit}/s, in terms of the fewest machines', and MB that a "
        "machine sends and receives in a step",
        ["", "machines", f"{unit}/s", "scaling", "MB"],
        rows,
    )
    for name, axis, lines in (
        ("speed", f"{unit}/s", words),
        ("scaling", "normalised", scaling),
        ("bytes", "MB a machine and step", carried),
    ):
        plots.lines(f"{name} {where}", where, ("machines", axis), lines)


# EuroSys Table 4, and the cumulative table of the arXiv version.

_TABLE_4 = ("allreduce", "naive ps", "ps", "hybrid")
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
        for workload in _workloads(options, ("lm", "nmt"))
        for rate in _rates(options, (SLOW,))
        for run in (
            *(_run(options, workload, way, rate) for way in _TABLE_4),
            *_cumulative(options, workload, rate),
        )
    ]


def _cumulative(options, workload, rate):
    machines = min(4, max(options.machines))
    return [
        _run(options, workload, way, rate, machines, processes=2)
        for way in _CUMULATIVE.values()
    ]


def _ablation(options, figures_of, plots):
    report = Report()
    for workload in _workloads(options, ("lm", "nmt")):
        for rate in _rates(options, (SLOW,)):
            where = f"{workload}, {_at(rate)}"
            runs = [_run(options, workload, way, rate) for way in _TABLE_4]
            found = dict(zip(_TABLE_4, map(figures_of, runs), strict=True))
            paper = PAPER_WORDS.get(workload, {})
            report.table(
                f"{where}, {max(options.machines)} machines, and EuroSys "
                "Table 4 (8 of 6 GPUs), in terms of AllReduce",
                ["", "words/s", "ratio", "the paper's", "MB"],
                [
                    [
                        way,
                        _words(figures),
                        _ratio(figures, found["allreduce"]),
                        paper and paper[way] / paper["allreduce"] or None,
                        _sent_and_received(figures),
                    ]
                    for way, figures in found.items()
                ],
            )
            bars = {w: _words(f) for w, f in found.items() if f}
            plots.bars(f"architectures {where}", where, "words/s", bars)
            for way, figures in found.items():
                report.check(f"{where}: {way}", _words(figures))
            _add_up(report, options, figures_of, plots, workload, rate)
    return report


def _add_up(report, options, figures_of, plots, workload, rate):
    where = f"{workload}, {_at(rate)}"
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
                _words(figures),
                _ratio(figures, base),
                _sent_and_received(figures),
            ]
            for step, figures in found.items()
        ],
    )
    for step, figures in found.items():
        report.check(f"{where}: {step}", _words(figures))
    bars = {step: _words(f) for step, f in found.items() if f}
    plots.bars(f"cumulative {where}", where, "words/s", bars)


# EuroSys Table 6.

_SWEEP_WAYS = ("hybrid", "naive ps", "horovod")


def _sweep_runs(options):
    return [
        _sweep_run(options, way, time, rate)
        for rate in _rates(options, (SLOW,))
        for time in SWEEP_TIMES
        for way in _SWEEP_WAYS
    ]


def _sweep_run(options, way, time, rate):
    script = (*SWEEP_OPTIONS, "--time", str(time), *options.arguments)
    return _run(options, "lm", way, rate, arguments=script)


def _sweep(options, figures_of, plots):
    report = Report()
    for rate in _rates(options, (SLOW,)):
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
                    f"{time} words, {_at(rate)}: {way}", _words(figures)
                )
                if alpha and figures:
                    lines[way].append((alpha, _words(figures)))
            rows.append(
                [
                    str(time),
                    alpha,
                    *map(_words, found.values()),
                    _ratio(ours, found["naive ps"]),
                    _ratio(ours, found["horovod"]),
                    paper[0],
                    paper[1] / paper[2],
                ]
            )
        report.table(
            f"Words/s by sparsity, {_at(rate)}, {max(options.machines)} "
            "machines; EuroSys Table 6 beside it, in its order",
            [
                *("words of an instance", "alpha of the model", *_SWEEP_WAYS),
                *("/ naive ps", "/ horovod"),
                *("the paper's alpha", "Parallax / TF-PS"),
            ],
            rows,
        )
        plots.lines(
            f"sparsity {_at(rate)}",
            f"lm, {_at(rate)}",
            ("alpha of the model", "words/s"),
            lines,
            logarithmic=True,
        )
    return report


# EuroSys 6.2. Held-out losses in nats a word, below those of the words'
# frequencies alone (7.2 and 5.4), and how they are come to: in one process with
# the batch of eight after 300 steps.

TARGETS = {
    "lm": (6, ("--learning-rate", "0.5")),
    "nmt": (
        4,
        ("--learning-rate", "1", "--vocabulary", "1000", "--time", "6")
        + ("--units", "128", "--sampled", "256"),
    ),
}
_TARGET_WAYS = (*BOTH, "horovod")


def _target_runs(options):
    return [
        _target_run(options, workload, way, rate)
        for rate in _rates(options, (SLOW,))
        for workload in _workloads(options, tuple(TARGETS))
        for way in _TARGET_WAYS
    ]


def _target_run(options, workload, way, rate):
    loss, arguments = TARGETS[workload]
    arguments += ("--target", str(loss), "--every", "25")
    arguments += ("--most-steps", "1000", *options.arguments)
    run = _run(options, workload, way, rate, arguments=arguments)
    # How many steps it takes is not known before; the small one learns within
    # minutes.
    return dataclasses.replace(run, steps=300, warm_up=2, size="small")


def _target(options, figures_of, plots):
    report = Report()
    for rate in _rates(options, (SLOW,)):
        for workload in _workloads(options, tuple(TARGETS)):
            where = f"{workload}, {_at(rate)}"
            rows, lines = [], {}
            slowest = target = least = None
            for way in reversed(_TARGET_WAYS):
                run = _target_run(options, workload, way, rate)
                found = (figures_of(run) or {}).get("to_target")
                if not (found and found["is_reached"]):
                    report.check(f"{where}, {way}: the target", None)
                    continue
                seconds = found["seconds"]
                target, least = found["target"], found["least_loss"]
                slowest = slowest or seconds
                report.check(f"{where}, {way}: seconds", seconds)
                rows.append([way, str(found["steps"]), seconds])
                rows[-1] += [slowest / seconds, found["curve"][-1]["loss"]]
                lines[way] = [(p["seconds"], p["loss"]) for p in found["curve"]]
            report.table(
                f"{where}, {max(options.machines)} machines: until a held-out "
                f"loss of {target} nats a word, of at least {least}",
                ["", "steps", "seconds", "times faster", "loss"],
                rows,
            )
            plots.lines(
                f"target {where}", where, ("seconds", "held-out loss"), lines
            )
    return report


SETS = {
    "quick": Set("one look: lm, 4 machines, 50 Mbit/s", _quick_runs, _quick),
    "speed": Set("words/s against Horovod's own way", _speed_runs, _speed),
    "bytes": Set("sparse bytes against the least", _bytes_runs, _bytes),
    "aggregation": Set(
        "machines of two processes that pull and push together",
        _aggregation_runs,
        _aggregation,
    ),
    "bound": Set("the step's time against the least", _bound_runs, _bound),
    "machines": Set(
        "1, 2, 4, 8 machines (EuroSys Figures 8, 9)", _machines_runs, _machines
    ),
    "ablation": Set(
        "one thing after the other (EuroSys Table 4)", _ablation_runs, _ablation
    ),
    "sweep": Set("by sparsity (EuroSys Table 6)", _sweep_runs, _sweep),
    "target": Set("time to a loss (EuroSys 6.2)", _target_runs, _target),
}
