"""The parts of all sets: runs and reports."""

import dataclasses
from collections.abc import Callable

import _report
import _traffic
from _runs import Run

RATES = (50, 200, 1000)
# Mbit/s at which a step of Horovod's own way is nearly all network.
SLOW = 50
# Milliseconds. Horovod's processes talk in each cycle: few where bytes count.
QUIET_CYCLE = 20
BOTH = ("hybrid", "hybrid bfloat16")


class Report:
    """The findings of a set.

    Attributes:
        tables: list of Markdown.
        figures: dict for the last line.
        beyond: list of sentences, of figures outside their limits.
        missing: list of sentences, of figures that were not measured.
    """

    def __init__(self):
        self.tables, self.figures = [], {}
        self.beyond, self.missing = [], []

    @property
    def misses(self):
        return [*self.beyond, *self.missing]

    def table(self, title, head, rows):
        if rows:
            self.tables.append(_report.table(title, head, rows))

    def check(self, name, value, least=None, most=None):
        """Keeps a figure and compares it with its limits."""
        if value is None:
            self.missing.append(f"{name}: not measured")
            return
        self.figures[name] = round(value, 4)
        if least is not None and value < least:
            self.beyond.append(f"{name}: {value:.3f}, at least {least} asked")
        if most is not None and value > most:
            self.beyond.append(f"{name}: {value:.3f}, at most {most} asked")


@dataclasses.dataclass(frozen=True)
class Set:
    """Runs that answer one question.

    Attributes:
        help: one line.
        runs: function from the options to a list of `Run`.
        report: function from the options, a function from a `Run` to its
            figures or None, and `_report.Plots` to a `Report`.
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
    """Words/s / those of another run; None where one has failed."""
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
