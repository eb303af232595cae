"""Words/s against what people would use instead."""

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


# One look.


def _quick_runs(options):
    return [
        make_run(options, workload, way, rate, min(4, max(options.machines)))
        for workload in workloads_of(options, ("lm",))
        for rate in rates_of(options, (SLOW,))
        for way in ("hybrid", "horovod")
    ]


def _quick(options, figures_of, plots):
    report = Report()
    rows = []
    for ours, peer in in_pairs(_quick_runs(options)):
        figures, others = figures_of(ours), figures_of(peer)
        ratio = words_ratio(figures, others)
        name = f"{ours.workload}, {at_rate(ours.rate)}"
        rows.append(
            [
                f"{name}, {ours.machines} machines",
                words_of(figures),
                words_of(others),
                ratio,
                sent_and_received(figures),
                sent_and_received(others),
            ]
        )
        report.check(name, ratio, least=1 if ours.rate == SLOW else None)
    report.table(
        "Words/s, and MB that a machine sends and receives in a step",
        ["", "hybrid", "Horovod's way", "ratio", "MB", "MB, Horovod's way"],
        rows,
    )
    return report


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
        make_run(options, workload, way, rate)
        for rate in rates_of(options)
        for workload in workloads_of(options, tuple(ASKED_SPEED))
        for way in _speed_ways(workload)
    ]


def _speed(options, figures_of, plots):
    report = Report()
    rows = []
    for rate in rates_of(options):
        for workload in workloads_of(options, tuple(ASKED_SPEED)):
            found = {
                way: figures_of(make_run(options, workload, way, rate))
                for way in _speed_ways(workload)
            }
            pairs = [("hybrid", "horovod"), ("hybrid bfloat16", "horovod fp16")]
            asked = ASKED_SPEED.get(workload, (None, None))
            ratios = []
            for (ours, peer), least in zip(pairs, asked, strict=True):
                if ours not in found:
                    ratios.append(None)
                    continue
                ratios.append(words_ratio(found[ours], found[peer]))
                report.check(
                    f"{workload}, {at_rate(rate)}: {ours} / {peer}",
                    ratios[-1],
                    least=least if rate == SLOW else None,
                )
            for ours, least in ASKED_OF_NAIVE.items():
                if "naive ps" in found:
                    report.check(
                        f"{workload}, {at_rate(rate)}: {ours} / naive ps",
                        words_ratio(found[ours], found["naive ps"]),
                        least=least if rate == SLOW else None,
                    )
            columns = [way for pair in pairs for way in pair]
            columns += ["naive ps", "tensorflow ps"]
            rows.append(
                [
                    f"{workload}, {WORKLOADS[workload][0]}/s, {at_rate(rate)}",
                    *(words_of(found.get(way)) for way in columns),
                    *ratios,
                ]
            )
    report.table(
        f"Against Horovod's own way, {max(options.machines)} machines",
        ["", *columns, "ratio, float32", "ratio, 16 bits"],
        rows,
    )
    return report


# What else there is.

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
# An all-dense model goes as fast as with Horovod; all else is faster.
ASKED_OF_OTHERS = {"inception_v3": ASKED_SPEED["resnet50"][0]}


def _others_runs(options):
    return [
        make_run(options, workload, way, rate)
        for workload, ways, rates in _OTHERS
        if workload in workloads_of(options, (workload,))
        for rate in rates_of(options, rates or (SLOW, _FAST))
        for way in ways
    ]


def _others(options, figures_of, plots):
    report = Report()
    rows = []
    for ours, peer in in_pairs(_others_runs(options)):
        figures, others = figures_of(ours), figures_of(peer)
        ratio = words_ratio(figures, others)
        name = f"{ours.workload}, {at_rate(ours.rate)}"
        report.check(
            f"{name}: {ours.way} / {peer.way}",
            ratio,
            least=ASKED_OF_OTHERS.get(ours.workload, 1.0),
        )
        rows.append(
            [
                *(name, ours.way, peer.way),
                *(words_of(figures), words_of(others), ratio),
                *(sent_and_received(figures), sent_and_received(others)),
            ]
        )
    report.table(
        f"Inception v3, float16 and Horovod's dense way, "
        f"{max(options.machines)} machines",
        [
            *("", "this library's way", "against", "a second"),
            *("a second, against", "ratio", "MB", "MB, against"),
        ],
        rows,
    )
    return report


OTHERS = Set(
    "Inception v3, float16, Horovod's dense way", _others_runs, _others
)
QUICK = Set("one look: lm, 4 machines, 50 Mbit/s", _quick_runs, _quick)
SPEED = Set("words/s against Horovod's own way", _speed_runs, _speed)
