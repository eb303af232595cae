"""Which architecture each variable has."""

import dataclasses
import functools
import operator

from keras_sparsity import checks
from keras_sparsity.planning.specs import (
    Cluster,
    VariableSpec,
    alpha_model,
    check_is,
    checked_variables,
)
from keras_sparsity.planning.transfer_cost import (
    ARCHITECTURES,
    engine_bytes,
    num_partitions,
    transfer_bytes,
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """A variable, its architecture, and what each one would cost.

    Attributes:
        variable: `VariableSpec`.
        architecture: the one with the fewest bytes.
        costs: dict from each architecture that was asked for, and that the
            variable can have, to its `TransferBytes`.
    """

    variable: VariableSpec
    architecture: str
    costs: dict


@dataclasses.dataclass(frozen=True)
class Plan:
    """The architecture of each variable of a model, see `plan`.

    Attributes:
        choices: tuple of `Choice`, one for each variable, in their order.
    """

    choices: tuple

    @property
    def total(self):
        """`TransferBytes` of the whole model."""
        return functools.reduce(
            operator.add, (c.costs[c.architecture] for c in self.choices)
        )

    @property
    def alpha_model(self):
        return alpha_model([choice.variable for choice in self.choices])


def plan(
    variables,
    cluster,
    architectures=ARCHITECTURES,
    local_aggregation="none",
    wire_dtype=None,
    index_bytes=8,
    engine=None,
):
    """Chooses for each variable the architecture with the fewest bytes.

    Fewest at the busiest machine, sent and received together; of equal ones
    "allreduce" comes before "ps" and that before "allgather" (which by these
    equations never has fewer than "ps"). On servers, the partitions of all
    variables go round the machines.

    Args:
        variables: list of `VariableSpec`.
        cluster: `Cluster`.
        architectures: those to choose from. One alone is a baseline:
            `("ps",)` has dense variables on servers, too.
        local_aggregation: as for `transfer_bytes`.
        wire_dtype: as for `transfer_bytes`.
        index_bytes: as for `transfer_bytes`.
        engine: count what this library moves by that engine, see
            `engine_bytes`. By default what the equations of the paper say,
            with the three options before this one.

    Returns:
        `Plan`.

    Example:

    >>> variables = [
    ...     VariableSpec("kernel", (2048, 512)),
    ...     VariableSpec("rare", (800_000, 512), alpha=0.002),
    ...     VariableSpec("usual", (1000, 512), alpha=1.0),
    ... ]
    >>> hybrid = plan(variables, Cluster(num_machines=8))
    >>> [choice.architecture for choice in hybrid.choices]
    ['allreduce', 'ps', 'allreduce']
    >>> servers = plan(variables, Cluster(num_machines=8), ("ps",))
    >>> hybrid.total.busiest_bytes < servers.total.busiest_bytes
    True

    References:
        EuroSys 3.1 (the hybrid architecture).
    """
    variables = checked_variables(variables)
    check_is(cluster, Cluster, "cluster")
    checks.check(
        isinstance(architectures, (list, tuple))
        and len(architectures) > 0
        and all(isinstance(a, str) for a in architectures)
        and set(architectures) <= set(ARCHITECTURES),
        "architectures",
        architectures,
        f"a list of some of {ARCHITECTURES}",
    )
    choices = []
    next_machine = 0
    for variable in variables:
        costs = {
            architecture: transfer_bytes(
                variable,
                architecture,
                cluster,
                local_aggregation,
                wire_dtype,
                index_bytes,
                next_machine,
            )
            if engine is None
            else engine_bytes(variable, architecture, cluster, engine)
            for architecture in ARCHITECTURES
            if architecture in architectures
            and (variable.is_sparse or architecture != "allgather")
        }
        checks.check(
            costs,
            "architectures",
            architectures,
            f"such that {variable.name!r} has one: it is dense, and "
            "'allgather' gathers rows",
        )
        choice = Choice(variable, _cheapest(costs), costs)
        choices.append(choice)
        if choice.architecture == "ps":
            next_machine += num_partitions(variable, cluster)
            next_machine %= cluster.num_machines
    return Plan(tuple(choices))


def _cheapest(costs):
    least = min(cost.busiest_bytes for cost in costs.values())
    # Equal ones may differ by a rounding error.
    return next(
        architecture
        for architecture, cost in costs.items()
        if cost.busiest_bytes <= least * (1 + 1e-9)
    )
