"""The plan of a model that is divided into a head and a tail."""

import dataclasses

from keras_sparsity.board.written_plan import (
    WrittenPlan,
    as_table,
    in_bytes,
    in_milliseconds,
    of_unknown,
)

_HEAD = (
    "divided after",
    "head",
    "a worker's passes",
    "activations of a worker",
    "busiest link",
    "the paper's star",
    "predicted step",
    "",
)


@dataclasses.dataclass(frozen=True)
class SplitPlan(WrittenPlan):
    """All places where a model may be divided, and their costs.

    Attributes:
        num_examples: the number of a mini-batch's examples.
        num_workers, num_tails: of the processes.
        costs: tuple of `SplitCost`; the first is that of data parallelism.
        names: dict from a place to the name of the head's last layer.
        worker_seconds: dict from a place, or None for data parallelism, to
            the measured time of a worker's passes, up to that place.
        skewness: how far the parameters are towards the end; below 0 if they
            are.
        threshold: by the paper's rule, a model whose skewness is not below it
            gains nothing.
        chosen: the place where the model is divided; None if it is trained by
            data parallelism.
        published: the place by the paper's rule, and
        fastest: that of the least predicted step; None if that is data
            parallelism.
        unknown_size: as for `StrategyPlan`; no batch tells sizes here.
    """

    num_examples: int
    num_workers: int
    num_tails: int
    costs: tuple
    names: dict
    worker_seconds: dict
    skewness: float
    threshold: float
    chosen: int | None
    published: int | None
    fastest: int | None
    unknown_size: int | None = None

    def markdown(self):
        has_rows = any(cost.row_bytes for cost in self.costs)
        has_tails = self.num_tails > 1
        head = [
            *_HEAD[:4],
            *["rows of a worker"] * has_rows,
            *["tail workers divide"] * has_tails,
            *_HEAD[4:],
        ]
        rows = [self._row(cost, has_rows, has_tails) for cost in self.costs]
        about = (
            f"Mini-batches of {self.num_examples} examples; workers: "
            f"{self.num_workers}, tail workers: {self.num_tails}. "
            f"Skewness of the parameters {self.skewness:.2f}, the threshold of "
            f"the paper's rule {self.threshold:g}. Bytes are those of a step, "
            "in one direction."
        ) + of_unknown(self.unknown_size)
        return as_table(head, rows, about)

    def _row(self, cost, has_rows, has_tails):
        is_split = cost.place is not None
        marks = {
            "chosen": cost.place == self.chosen,
            "the paper's": cost.place == self.published,
            "fastest": cost.place == self.fastest,
        }
        return [
            self.names[cost.place] if is_split else "(data parallelism)",
            in_bytes(cost.head_bytes),
            in_milliseconds(self.worker_seconds[cost.place]),
            in_bytes(cost.sent_bytes),
            *[in_bytes(cost.row_bytes)] * has_rows,
            *[cost.tail_split if is_split else ""] * has_tails,
            in_bytes(cost.busiest_bytes),
            in_bytes(cost.star_bytes) if is_split else "",
            in_milliseconds(cost.seconds),
            ", ".join(name for name, holds in marks.items() if holds),
        ]
