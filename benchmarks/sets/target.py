"""Time to a held-out loss (EuroSys 6.2)."""

import dataclasses

from sets.base import (
    BOTH,
    SLOW,
    Report,
    Set,
    at_rate,
    make_run,
    rates_of,
    workloads_of,
)
from sets.paper import PAPER_WORDS

# Held-out losses in nats a word, below those of the words' frequencies alone
# (7.2 and 5.4), and arguments with which one process with the batch of eight
# reaches them after 300 steps.
TARGETS = {
    "lm": (6, ("--learning-rate", "0.5")),
    "nmt": (
        4,
        ("--learning-rate", "1", "--vocabulary", "1000", "--time", "6")
        + ("--units", "128", "--sampled", "256", "--batch", "64"),
    ),
}
_TARGET_WAYS = (*BOTH, "horovod")
# Least ratio: Horovod's seconds / this library's.
ASKED_OF_TARGET = 1.0


def _target_runs(options):
    return [
        _target_run(options, workload, way, rate)
        for rate in rates_of(options, (SLOW,))
        for workload in workloads_of(options, tuple(TARGETS))
        for way in _TARGET_WAYS
    ]


def _target_run(options, workload, way, rate):
    loss, arguments = TARGETS[workload]
    arguments += ("--target", str(loss), "--every", "25")
    arguments += ("--most-steps", "1000", *options.arguments)
    run = make_run(options, workload, way, rate, arguments=arguments)
    # The number of steps is unknown; the small size learns within minutes.
    return dataclasses.replace(run, steps=300, warm_up=2, size="small")


def _target(options, figures_of, plots):
    report = Report()
    for rate in rates_of(options, (SLOW,)):
        for workload in workloads_of(options, tuple(TARGETS)):
            where = f"{workload}, {at_rate(rate)}"
            rows, lines = [], {}
            words = PAPER_WORDS[workload]
            # With equal numbers of steps, training scales as words/s.
            paper = {"hybrid": words["hybrid"] / words["allreduce"]}
            paper["horovod"] = 1.0
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
                report.check(
                    f"{where}, {way}: times faster",
                    slowest / seconds,
                    least=ASKED_OF_TARGET,
                )
                rows.append([way, str(found["steps"]), seconds])
                rows[-1] += [slowest / seconds, paper.get(way)]
                rows[-1].append(found["curve"][-1]["loss"])
                lines[way] = [(p["seconds"], p["loss"]) for p in found["curve"]]
            report.table(
                f"{where}, {max(options.machines)} machines: until a held-out "
                f"loss of {target} nats a word, of at least {least}",
                [
                    *("", "steps", "seconds", "times faster"),
                    *("EuroSys Table 4, words/s", "loss"),
                ],
                rows,
            )
            plots.lines("target", where, ("seconds", "held-out loss"), lines)
    return report


TARGET = Set("time to a loss (EuroSys 6.2)", _target_runs, _target)
