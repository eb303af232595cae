"""The facts on which the bytes of a variable's messages depend."""

import collections
import dataclasses
import math

from keras_sparsity.planning.specs import Cluster


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The facts on which the bytes of a placement depend.

    Attributes:
        cluster, engine, largest_rows, local_aggregation, pulled_bytes: as for
            `planning.engine_bytes`.
        machine: the machine of the server that sums a dense gradient, where
            servers take turns.
    """

    cluster: Cluster
    engine: str
    largest_rows: float | None
    local_aggregation: bool
    pulled_bytes: float | None
    machine: int

    def facts(self, first_machine=0):
        """The arguments of `planning.engine_bytes`, from the cluster on."""
        return (
            self.cluster,
            self.engine,
            self.largest_rows,
            first_machine,
            self.local_aggregation,
            self.pulled_bytes,
        )

    @classmethod
    def of(cls, variable, placements, largest_rows=None, number=0):
        """Of a model's variable under running `Placements`.

        Args:
            largest_rows: as the attribute.
            number: how many variables with the same reducer come before.
        """
        communicator = placements.communicator
        cluster = running_cluster(communicator)
        return cls(
            cluster,
            communicator.engine,
            largest_rows,
            placements.options.goes_through_machines(communicator),
            getattr(getattr(variable, "table", None), "pulled_bytes", None),
            _machine_of(number % communicator.size, communicator, cluster),
        )


def running_cluster(communicator):
    """The `Cluster` of the running processes.

    Those of one machine count as machines of one process each: their messages
    are not free. So do those of machines with unequal numbers of processes, of
    which each rank has a topology of its own.
    """
    of_machines = collections.Counter(communicator.machines).values()
    if len(of_machines) == 1 or len(set(of_machines)) > 1:
        return Cluster(communicator.size)
    return Cluster(len(of_machines), max(of_machines))


def _machine_of(rank, communicator, cluster):
    """The number of a rank's machine in the running `Cluster`."""
    if cluster.num_machines == communicator.size:
        return rank
    machines = communicator.machines
    return list(dict.fromkeys(machines)).index(machines[rank])


def as_sent(spec, options, communicator=None):
    """A `VariableSpec` in the dtype, and in the rows, in which it travels.

    Args:
        communicator: `Collectives` of the processes that are planned for, if
            they run. Costs count all of them as workers: rows that workers
            touch are spread over dedicated servers, too.
    """
    if spec.is_sparse and communicator is not None:
        spec = _of_all_processes(spec, communicator)
    row_bytes = None
    if spec.is_sparse:
        width = math.prod(spec.shape[1:])
        row_bytes = options.encoded_bytes(spec.dtype, width)
    return dataclasses.replace(
        spec, dtype=options.wire(spec.dtype).dtype.name, row_bytes=row_bytes
    )


def _of_all_processes(spec, communicator):
    """The spec with the means over all processes in place of workers."""
    machines, num_workers = communicator.machines, communicator.num_workers
    alpha = spec.alpha * num_workers / communicator.size
    together = spec.alpha_machine
    if together is not None:
        together *= len(set(machines[:num_workers])) / len(set(machines))
        together = max(together, alpha)
    return dataclasses.replace(spec, alpha=alpha, alpha_machine=together)
