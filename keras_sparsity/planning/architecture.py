"""Chooses the architecture of each variable of a model."""

import dataclasses
import functools
import operator

from keras_sparsity._tf import checks
from keras_sparsity.planning.engine_cost import engine_bytes
from keras_sparsity.planning.specs import (
    Cluster,
    VariableSpec,
    alpha_model,
    check_is,
    checked_variables,
)
from keras_sparsity.planning.transfer_cost import (
    ARCHITECTURES,
    PARTITIONED,
    architectures_of,
    num_partitions,
    transfer_bytes,
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The architecture of a variable, and the costs of all.

    Args:
        variable: `VariableSpec`.
        architecture: the architecture that `plan` chooses.
        costs: dict from each possible architecture to its `TransferBytes`.

    Raises:
        Nothing: `plan` makes it.

    Example:

    >>> table = VariableSpec("table", (1000, 64), alpha=0.02)
    >>> (choice,) = plan([table], Cluster(4)).choices
    >>> choice.architecture, list(choice.costs)
    ('ps', ['allreduce', 'ps', 'allgather'])

    References:
        EuroSys 3.1.
    """

    variable: VariableSpec
    architecture: str
    costs: dict


@dataclasses.dataclass(frozen=True)
class Plan:
    """The architecture of each variable of a model, see `plan`.

    Args:
        choices: tuple of `Choice`, one for each variable, in their order.

    Raises:
        Nothing: `plan` makes it.

    Example:

    >>> found = plan([VariableSpec("kernel", (100, 10))], Cluster(2))
    >>> round(found.total.busiest_bytes), found.alpha_model
    (8000, 1.0)

    References:
        EuroSys 3.1.
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

    Counted at the busiest machine, sent and received together. Among equals
    "allreduce" comes before "ps", and "ps" before "allgather", which by these
    equations never has fewer. A dense variable gets "allreduce" if it may: by
    the equations "ps" never has fewer, and with an `engine`, whose ring goes
    through all processes, strategies choose it nevertheless. The partitions
    of all variables on servers take turns on the machines.

    Args:
        variables: list of `VariableSpec`.
        cluster: `Cluster`.
        architectures: the architectures to choose from. One alone is a
            baseline: `("ps",)` puts dense variables on servers, too.
        local_aggregation: as for `transfer_bytes`.
        wire_dtype: as for `transfer_bytes`.
        index_bytes: as for `transfer_bytes`.
        engine: count the bytes that this library moves by that engine, see
            `engine_bytes`. By default those of the paper's equations, with
            the three options before this one.

    Returns:
        `Plan`.

    Raises:
        ValueError: if an argument has another type or value, or a variable
            none of the architectures.

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
    _check_architectures(architectures)

    def cost(variable, architecture):
        if engine is not None:
            return engine_bytes(
                variable,
                architecture,
                cluster,
                engine,
                first_machine=next_machine,
            )
        return transfer_bytes(
            variable,
            architecture,
            cluster,
            local_aggregation,
            wire_dtype,
            index_bytes,
            next_machine,
        )

    choices = []
    next_machine = 0
    for variable in variables:
        costs = {
            name: cost(variable, name)
            for name in architectures_of(variable)
            if name in architectures
        }
        checks.check(
            costs,
            "architectures",
            architectures,
            f"such that {variable.name!r} has one: it is dense, and "
            "'allgather' gathers rows",
        )
        dense = None if variable.is_sparse else "allreduce"
        name = dense if dense in costs else _cheapest(costs)
        choice = Choice(variable, name, costs)
        choices.append(choice)
        if choice.architecture in PARTITIONED:
            next_machine += num_partitions(variable, cluster)
            next_machine %= cluster.num_machines
    return Plan(tuple(choices))


def _check_architectures(architectures):
    checks.check(
        isinstance(architectures, (list, tuple))
        and len(architectures) > 0
        and all(isinstance(a, str) for a in architectures)
        and set(architectures) <= set(ARCHITECTURES),
        "architectures",
        architectures,
        f"a list of some of {ARCHITECTURES}",
    )


def _cheapest(costs):
    least = min(cost.busiest_bytes for cost in costs.values())
    # Equal ones may differ by a rounding error.
    return next(
        architecture
        for architecture, cost in costs.items()
        if cost.busiest_bytes <= least * (1 + 1e-9)
    )
