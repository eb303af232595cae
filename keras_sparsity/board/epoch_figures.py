"""Figures of an epoch of asynchronous training."""

import dataclasses

import numpy as np
import tensorflow as tf

from keras_sparsity.board.written_plan import (
    PLAN,
    WrittenPlan,
    as_table,
    in_bytes,
)

_HEAD = ("rank", "updates as a server", "pulled", "pushed", "steps", "waited")


@dataclasses.dataclass
class ServerTraffic:
    """What workers had of one server in an epoch.

    Args:
        num_updates: pushes of gradients, of a worker's batch each.
        pulled_bytes: of values that workers pulled.
        pushed_bytes: of row numbers and gradients that they pushed.
    """

    num_updates: int = 0
    pulled_bytes: int = 0
    pushed_bytes: int = 0

    def __add__(self, other):
        pairs = zip(
            dataclasses.astuple(self), dataclasses.astuple(other), strict=True
        )
        return ServerTraffic(*map(sum, pairs))


@dataclasses.dataclass
class EpochFigures(WrittenPlan):
    """Of all workers together.

    Args:
        version: the number of updates of the weights at its end.
        staleness: dict from a number of updates between a pull and its push
            to the number of pushes.
        waiting_seconds: dict from a worker's rank to the time that it waited
            at the bound.
        num_steps: dict from a worker's rank to the number of its batches.
        servers: dict from a server's rank to `ServerTraffic`.
    """

    version: int = 0
    staleness: dict = dataclasses.field(default_factory=dict)
    waiting_seconds: dict = dataclasses.field(default_factory=dict)
    num_steps: dict = dataclasses.field(default_factory=dict)
    servers: dict = dataclasses.field(default_factory=dict)

    @classmethod
    def of_records(cls, version, records):
        """Of workers' records: dicts of "rank" and figures of one worker."""
        staleness, servers = {}, {}
        for record in records:
            for updates, pushes in record["staleness"].items():
                staleness[updates] = staleness.get(updates, 0) + pushes
            for rank, traffic in record["servers"].items():
                before = servers.get(rank, ServerTraffic())
                servers[rank] = before + traffic
        return cls(
            version,
            dict(sorted(staleness.items())),
            {each["rank"]: each["waiting_seconds"] for each in records},
            {each["rank"]: each["steps"] for each in records},
            dict(sorted(servers.items())),
        )

    def markdown(self):
        rows = []
        for rank in sorted({*self.servers, *self.num_steps}):
            cells = ["", "", "", "", ""]
            if rank in self.servers:
                traffic = self.servers[rank]
                cells[:3] = (
                    f"{traffic.num_updates:,}",
                    in_bytes(traffic.pulled_bytes),
                    in_bytes(traffic.pushed_bytes),
                )
            if rank in self.num_steps:
                waited = self.waiting_seconds[rank]
                cells[3:] = f"{self.num_steps[rank]:,}", f"{waited:.3f} s"
            rows.append([str(rank), *cells])
        counts = ", ".join(f"{n}: {c:,}" for n, c in self.staleness.items())
        about = (
            f"Version {self.version:,} of the weights. Pushes by the number of "
            f"updates since their pull: {counts}."
        )
        return as_table(_HEAD, rows, about)

    def write_summaries(self):
        """Writes them into TensorFlow's default summary writer."""
        tf.summary.text(PLAN, self.markdown())
        tf.summary.scalar("version", self.version)
        updates = np.repeat([*self.staleness], [*self.staleness.values()])
        if len(updates):
            tf.summary.histogram("staleness/of pushes", updates)
            tf.summary.scalar("staleness/mean", updates.mean())
            tf.summary.scalar("staleness/largest", updates.max())
        for rank, seconds in self.waiting_seconds.items():
            tf.summary.scalar(f"waiting seconds/rank {rank}", seconds)
            tf.summary.scalar(f"steps/rank {rank}", self.num_steps[rank])
        for rank, traffic in self.servers.items():
            for name, value in dataclasses.asdict(traffic).items():
                tf.summary.scalar(f"server {rank}/{name}", value)
