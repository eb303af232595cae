"""Words/s against other ways to train."""

from _runs import WORKLOADS

from sets.base import (
    SLOW,
    Report,
    Set,
    at_rate,
    in_pairs,
    make_run,
    rates_of,
    sent_and_received,
    words_of,
    words_ratio,
    workloads_of,
)

FLOAT32, NARROW = ("hybrid", "horovod"), ("hybrid bfloat16", "horovod fp16")
# Of these pairs the least words/s of the first / those of the second, on 8
# machines at 50 Mbit/s.
ASKED = {
    "lm": {
        FLOAT32: 4,
        NARROW: 7,
        ("hybrid", "naive ps"): 1.5,
        ("hybrid bfloat16", "naive ps"): 2.8,
    },
    "nmt": {FLOAT32: 2.3, NARROW: 4},
    "recommender": {FLOAT32: 4, NARROW: 7},
    "resnet50": {FLOAT32: 0.98},
}


# Pairs of runs: this library's and a peer's.


def _quick_runs(options):
    return [
        make_run(options, workload, way, rate, min(4, max(options.machines)))
        for workload in workloads_of(options, ("lm",))
        for rate in rates_of(options, (SLOW,))
        for way in ("hybrid", "horovod")
    ]


def _quick(options, figures_of, plots):
    title = "One look"
    return _pairs(
        title,
        _quick_runs(options),
        figures_of,
        lambda run: 1 if run.rate == SLOW else None,
    )


# Horovod's dense way sends whole tables: where the links are fast.
_FAST = 1000
_OTHERS = (
    ("inception_v3", ("hybrid", "horovod"), None),
    *(
        (workload, ("hybrid float16", "horovod fp16"), None)
        for workload in ("nmt", "recommender", "lm")
    ),
    *(
        (workload, ("hybrid", "horovod dense"), (_FAST,))
        for workload in ("nmt", "recommender", "lm")
    ),
)
# An all-dense model trains as fast as with Horovod, the others faster.
ASKED_OF_OTHERS = {"inception_v3": ASKED["resnet50"][FLOAT32]}


def _others_runs(options):
    return [
        make_run(options, workload, way, rate)
        for workload, ways, rates in _OTHERS
        if workload in workloads_of(options, (workload,))
        for rate in rates_of(options, rates or (SLOW, _FAST))
        for way in ways
    ]


def _others(options, figures_of, plots):
    return _pairs(
        "Inception v3, float16 and Horovod's dense way, "
        f"{max(options.machines)} machines",
        _others_runs(options),
        figures_of,
        lambda run: ASKED_OF_OTHERS.get(run.workload, 1.0),
    )


def _pairs(title, runs, figures_of, asked):
    """A table of pairs of runs.

    Args:
        title: of the table.
        runs: list of `Run`, pair by pair.
        figures_of: see `Set.report`.
        asked: function from the pair's first run to its least ratio, or None.
    """
    report, rows = Report(), []
    for ours, peer in in_pairs(runs):
        figures, others = figures_of(ours), figures_of(peer)
        ratio = words_ratio(figures, others)
        where = f"{ours.workload}, {at_rate(ours.rate)}"
        name = f"{where}: {ours.way} / {peer.way}"
        report.check(name, ratio, least=asked(ours))
        if figures or others:
            rows.append(
                [
                    f"{where}, {WORKLOADS[ours.workload][0]}/s",
                    *(ours.way, peer.way),
                    *(words_of(figures), words_of(others), ratio),
                    *(sent_and_received(figures), sent_and_received(others)),
                ]
            )
    report.table(
        title,
        ["", "ours", "peer", "ours /s", "peer /s", "ratio", "MB", "peer MB"],
        rows,
    )
    return report


# All ways side by side.

# TensorFlow's own servers are asynchronous: for comparison, and not judged.
_OF_SERVERS = ("lm", "nmt", "recommender")
_COLUMNS = (*FLOAT32, *NARROW, "naive ps", "tensorflow ps")


def _speed_runs(options):
    return [
        run
        for rate in rates_of(options)
        for workload in workloads_of(options, tuple(ASKED))
        for run in _speed_ways(options, workload, rate).values()
    ]


def _speed_ways(options, workload, rate):
    """dict from a way to its run."""
    ways = [way for pair in _asked(workload) for way in pair]
    ways += ["tensorflow ps"] * (workload in _OF_SERVERS)
    return {way: make_run(options, workload, way, rate) for way in ways}


def _asked(workload):
    return ASKED.get(workload, {FLOAT32: None})


def _speed(options, figures_of, plots):
    report, rows = Report(), []
    for rate in rates_of(options):
        for workload in workloads_of(options, tuple(ASKED)):
            runs = _speed_ways(options, workload, rate)
            found = {way: figures_of(run) for way, run in runs.items()}
            where, ratios = f"{workload}, {at_rate(rate)}", {}
            for (ours, peer), least in _asked(workload).items():
                ratio = words_ratio(found[ours], found[peer])
                ratios[ours, peer] = ratio
                least = least if rate == SLOW else None
                report.check(f"{where}: {ours} / {peer}", ratio, least=least)
            if any(found.values()):
                rows.append(
                    [
                        f"{where}, {WORKLOADS[workload][0]}/s",
                        *(words_of(found.get(way)) for way in _COLUMNS),
                        *(ratios.get(pair) for pair in (FLOAT32, NARROW)),
                    ]
                )
    report.table(
        f"Against Horovod's own way, {max(options.machines)} machines",
        ["", *_COLUMNS, "ratio, float32", "ratio, 16 bits"],
        rows,
    )
    return report


OTHERS = Set(
    "Inception v3, float16, Horovod's dense way", _others_runs, _others
)
QUICK = Set("one look: lm, 4 machines, 50 Mbit/s", _quick_runs, _quick)
SPEED = Set("words/s against Horovod's own way", _speed_runs, _speed)
