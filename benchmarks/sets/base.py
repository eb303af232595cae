"""What the sets have in common: the runs that they name, what they report."""

import dataclasses
from collections.abc import Callable

import _report
import _traffic
from _runs import Run

RATES = (50, 200, 1000)
# At which the step of Horovod's own way is nearly all network.
SLOW = 50
# Horovod's processes talk in each cycle; where bytes are counted, less often.
QUIET_CYCLE = 20
BOTH = ("hybrid", "hybrid bfloat16")


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


def make_run(options, workload, way, rate, machines=None, **others):
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


def rates_of(options, own=RATES):
    return options.rates or own


def workloads_of(options, own):
    return options.workloads or own


def words_of(figures):
    return figures and figures["words_per_second"]


def words_ratio(figures, of):
    """Of words/s; None where a run has failed."""
    return words_of(figures) / words_of(of) if figures and of else None


def at_rate(rate):
    return f"{rate:g} Mbit/s"


def megabytes(number):
    return None if number is None else number / 1e6


def sent_and_received(figures):
    return figures and megabytes(_traffic.carried_bytes(figures))


def in_pairs(runs):
    return zip(runs[::2], runs[1::2], strict=True)


def sparse_workloads(options):
    return workloads_of(options, ("lm", "nmt", "recommender"))
