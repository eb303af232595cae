"""The ways to train a model, compared in one table."""

import dataclasses

from keras_sparsity import planning
from keras_sparsity.board.written_plan import (
    WrittenPlan,
    as_table,
    in_bytes,
    in_seconds,
    of_unknown,
)
from keras_sparsity.stages.costs import (
    DATA_PARALLELISM,
    LAYER_PLACEMENT,
    PIPELINE,
)
from keras_sparsity.stages.measurements import UNMEASURED_RATE

_HEAD = (
    "strategy",
    "processes",
    "predicted step",
    "busiest link",
    "memory",
    "missed updates",
    "exact",
    "bound",
)
# More rows say little.
_MOST_ROWS = 20


@dataclasses.dataclass(frozen=True)
class StrategyPlan(WrittenPlan):
    """All ways to train a model on a cluster, the fastest first.

    Attributes:
        costs: tuple of `StrategyCost`.
        cluster: the `planning.Cluster`.
        num_examples: the number of a mini-batch's examples.
        failures: dict from each way that could not be compared to the reason.
        unknown_size: the number that sizes count as that neither the model nor
            the batch tells, such as a sequence's length; None if there are
            none.
        pairs: tuple of the names of the calls that compute with pairs of
            examples.
    """

    costs: tuple
    cluster: planning.Cluster
    num_examples: int
    failures: dict = dataclasses.field(default_factory=dict)
    unknown_size: int | None = None
    pairs: tuple = ()

    def best(self, asynchronous=False):
        """The fastest `StrategyCost` that fits the memory of a process.

        Args:
            asynchronous: whether it may be one whose passes miss updates.

        Raises:
            ValueError: if none fits, or none could be compared.
        """
        if not self.costs:
            reasons = "; ".join(f"{w}: {r}" for w, r in self.failures.items())
            raise ValueError(
                "The ways to train this model could not be compared. "
                f"{reasons}. Mend the layer or function that raises this, or "
                "train under `ks.HybridStrategy`."
            )
        fitting = [cost for cost in self.costs if cost.fits]
        for cost in fitting:
            if cost.is_exact or asynchronous:
                return cost
        if fitting:
            raise ValueError(
                "The ways to train this model that fit the memory of a process "
                "miss updates: their result is not that of one process. "
                f"Received: cluster={self.cluster}; the fastest of them is "
                f"{described(fitting[0])}. Ask for it by `asynchronous=True`, "
                "or use smaller batches or more processes."
            )
        least = min(self.costs, key=lambda cost: max(cost.memory_bytes))
        raise ValueError(
            "No way to train this model fits the memory of a process. "
            f"Received: cluster={self.cluster}; the least is "
            f"{in_bytes(max(least.memory_bytes))}, by {described(least)}. Use "
            "smaller batches or more processes."
        )

    def markdown(self):
        # And the fastest of each way.
        ways = [cost.way for cost in self.costs]
        shown = [
            cost
            for number, cost in enumerate(self.costs)
            if number < _MOST_ROWS or cost.way not in ways[:number]
        ]
        about = self._about(len(self.costs) - len(shown))
        rows = [_row(cost, self._exact(cost)) for cost in shown]
        rows += map(_failed_row, self.failures.items())
        return as_table(_HEAD, rows, about)

    @property
    def _divided_pairs(self):
        """The names of the calls whose pairs several processes divide."""
        return self.pairs if self.cluster.size > 1 else ()

    def _exact(self, cost):
        """Whether its result is that of one process, in words."""
        if self._divided_pairs and cost.way == DATA_PARALLELISM:
            return "if it gathers"
        return "yes" if cost.is_exact else "no"

    def _about(self, left_out):
        cluster = self.cluster
        text = (
            f"Mini-batches of {self.num_examples} examples on "
            f"{cluster.num_machines} machines of "
            f"{cluster.processes_per_machine}"
            f"{_of_links(cluster.megabits_per_second)}. Bytes are those of a "
            "step on the busiest link, in one direction; memory is that of "
            "the process with the most."
        )
        text += of_unknown(self.unknown_size) + _of_pairs(self._divided_pairs)
        if left_out:
            text += f" Slower ways that are not shown: {left_out}."
        return text


def _of_links(rate):
    if rate is None:
        return ""
    if rate == UNMEASURED_RATE:
        return ", links too fast to measure"
    shown = f"{rate:.4g}" if rate < 1e4 else f"{rate:.0f}"
    return f", links of {shown} Mbit/s"


def _of_pairs(names):
    if not names:
        return ""
    return (
        f" '{names[0]}' computes with pairs of a mini-batch's examples: layer "
        "placement and pipelines that divide mini-batches there are left out, "
        "and under data parallelism the pairs are those of a process's part, "
        "unless the model gathers them (`ks.gather_batch`)."
    )


def described(cost):
    """A `StrategyCost` in words."""
    if cost.way == LAYER_PLACEMENT:
        return f"{cost.way} after '{cost.stages[0]}'"
    if cost.way == PIPELINE:
        parts = ""
        if cost.num_micro_batches > 1:
            parts = f", {cost.num_micro_batches} micro-batches"
        if cost.messages_ahead:
            parts = ", messages ahead"
        return f"{cost.way} '{cost.schedule}'{parts}"
    return cost.way


def _row(cost, exact):
    return [
        described(cost),
        _processes(cost),
        in_seconds(cost.step_seconds),
        in_bytes(cost.busiest_bytes),
        in_bytes(max(cost.memory_bytes)),
        str(cost.missed_updates),
        exact,
        cost.bound,
    ]


def _failed_row(failure):
    way, reason = failure
    empty = [""] * (len(_HEAD) - 2)
    return [way, *empty, f"could not be compared: {reason}"]


def _processes(cost):
    if cost.way == LAYER_PLACEMENT:
        divided = f", {cost.tail_split}" if cost.num_tails > 1 else ""
        return f"{cost.num_replicas} + {cost.num_tails} of the tail{divided}"
    if cost.way == PIPELINE:
        of_stage = f" x {cost.num_replicas} replicas"
        number = f"{len(cost.stages) + 1} stages"
        if cost.ranks_of_stages:
            return f"{number} of {' + '.join(map(str, cost.ranks_of_stages))}"
        return number + (of_stage if cost.num_replicas > 1 else "")
    return f"{cost.num_replicas} replicas"
