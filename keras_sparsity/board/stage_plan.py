"""The plan of a model in stages: its cuts, and the cost of each stage."""

import dataclasses
import itertools

from keras_sparsity.board.written_plan import (
    WrittenPlan,
    as_table,
    in_bytes,
    in_milliseconds,
)

_HEAD = (
    "stage",
    "ranks",
    "layers",
    "weights",
    "forward pass",
    "backward pass",
    "update",
    "sends on",
    "sends back",
    "memory",
    "missed updates",
)


@dataclasses.dataclass(frozen=True)
class StageCost:
    """One stage of a `PipelinePlan`, in a step.

    Attributes:
        ranks: tuple of the ranks that train it; the costs are those of one.
        layers: tuple of its layers' names.
        weight_bytes, gradient_bytes: bytes of its weights, and of those that
            are trained.
        forward_seconds, backward_seconds: time of its passes of a rank's share
            of the mini-batch, without the messages and the loss. Where a
            backward pass computes the layers again, that counts.
        update_seconds: time of its optimizer's update, of an `Embedding` that
            is updated by rows that of the looked-up ones.
        sent_bytes, returned_bytes: bytes of activations that it sends to the
            stage behind, and of their gradients to the one before.
        memory_bytes: bytes of weights, gradients, optimizer slots, copies of
            weights, and of the layers' outputs that are held at once. Tensors
            within a layer and buffers of the runtime come on top.
        missed_updates: updates of earlier mini-batches that a forward pass
            comes before, once the pipeline is full: its staleness.
        table_bytes: of the trained weights, bytes of the `Embedding`s of which
            a step reads and updates the rows that it looks up alone.
        row_bytes: bytes of the gradients of these rows, with their numbers:
            of one process in a step, at most.
    """

    ranks: tuple
    layers: tuple
    weight_bytes: int
    gradient_bytes: int
    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    sent_bytes: int
    returned_bytes: int
    memory_bytes: int
    missed_updates: int
    table_bytes: int = 0
    row_bytes: int = 0

    @property
    def seconds(self):
        """Time of all its work in a step."""
        return (
            self.forward_seconds + self.backward_seconds + self.update_seconds
        )


@dataclasses.dataclass(frozen=True)
class PipelinePlan(WrittenPlan):
    """The cuts of a model, and the cost of each stage.

    Attributes:
        schedule: the schedule's name.
        num_examples: the number of a mini-batch's examples.
        num_micro_batches: the number of parts that a replica computes.
        replicas: the number of pipelines.
        step_seconds: time of a step, if messages take none.
        stages: tuple of `StageCost`.
    """

    schedule: str
    num_examples: int
    num_micro_batches: int
    replicas: int
    step_seconds: float
    stages: tuple

    @property
    def bubble(self):
        """The share of the stages' time in which they wait, from 0 to 1."""
        busy = sum(stage.seconds * len(stage.ranks) for stage in self.stages)
        return 1 - busy / (self.step_seconds * self.num_ranks)

    @property
    def num_ranks(self):
        """The number of all processes."""
        return sum(len(stage.ranks) for stage in self.stages)

    @property
    def busiest_bytes(self):
        """Bytes that the busiest process sends and receives in a step."""
        links = [0]
        for stage, behind in itertools.pairwise(self.stages):
            links.append(
                stage.sent_bytes * len(stage.ranks)
                + behind.returned_bytes * len(behind.ranks)
            )
        links.append(0)
        return max(
            (before + after) / len(stage.ranks) + self.summed_bytes(stage)
            for stage, before, after in zip(
                self.stages, links, links[1:], strict=False
            )
        )

    def summed_bytes(self, stage):
        """Bytes that a rank of a stage sends and receives to sum gradients.

        By AllReduce; looked-up rows by AllGather.
        """
        dense = stage.gradient_bytes - stage.table_bytes
        of_rows = 2 * (len(stage.ranks) - 1) * stage.row_bytes
        return _ring(dense, len(stage.ranks)) + of_rows

    @property
    def allreduce_bytes(self):
        """Those of data parallelism by AllReduce, for comparison."""
        return _ring(
            sum(stage.gradient_bytes for stage in self.stages),
            self.num_ranks,
        )

    def markdown(self):
        head = _HEAD
        rows = [_row(number, stage) for number, stage in enumerate(self.stages)]
        if any(stage.table_bytes for stage in self.stages):
            head = (*head, "rows looked up")
            for row, stage in zip(rows, self.stages, strict=True):
                row.append(_looked_up(stage))
        if self.num_ranks > len(self.stages):
            head = (*head, "sums gradients")
            for row, stage in zip(rows, self.stages, strict=True):
                row.append(in_bytes(self.summed_bytes(stage)))
        return as_table(head, rows, self._of_the_model())

    def _of_the_model(self):
        parts = ""
        if self.num_micro_batches > 1:
            parts = f" in {self.num_micro_batches} micro-batches"
        replicas = ""
        if self.replicas > 1:
            replicas = f", divided among {self.replicas} replicas,"
        return (
            f"Schedule {self.schedule!r}, mini-batches of {self.num_examples} "
            f"examples{replicas}{parts}. Without time for messages a step "
            f"takes {in_milliseconds(self.step_seconds)}, of which stages wait "
            f"{self.bubble:.0%}. Per step the busiest process sends and "
            f"receives {in_bytes(self.busiest_bytes)}; with the whole model on "
            "each process, AllReduce of all gradients would take "
            f"{in_bytes(self.allreduce_bytes)}."
        )


def _ring(num_bytes, size):
    """Bytes that each of some processes sends and receives for a sum."""
    return 4 * num_bytes * (size - 1) / size


def _row(number, stage):
    return [
        str(number),
        ", ".join(map(str, stage.ranks)),
        _span(stage.layers),
        in_bytes(stage.weight_bytes),
        in_milliseconds(stage.forward_seconds),
        in_milliseconds(stage.backward_seconds),
        in_milliseconds(stage.update_seconds),
        in_bytes(stage.sent_bytes),
        in_bytes(stage.returned_bytes),
        in_bytes(stage.memory_bytes),
        str(stage.missed_updates),
    ]


def _looked_up(stage):
    if not stage.table_bytes:
        return "-"
    return f"{in_bytes(stage.row_bytes)} of {in_bytes(stage.table_bytes)}"


def _span(layers):
    if len(layers) == 1:
        return layers[0]
    return f"{layers[0]} to {layers[-1]} ({len(layers)})"
