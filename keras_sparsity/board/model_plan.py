"""The plan of a model: how sparse its variables are, and how each travels."""

import collections
import collections.abc
import dataclasses
import functools
import operator

from keras_sparsity import planning, sparsity
from keras_sparsity.board.strategy_plan import StrategyPlan
from keras_sparsity.board.written_plan import (
    as_table,
    in_bytes,
    print_markdown,
)
from keras_sparsity.placement.traffic import Traffic, as_sent, running_cluster
from keras_sparsity.planning import transfer_cost
from keras_sparsity.tables.table_variable import partitions_of

# Of dense variables so many are listed one by one.
_MOST_DENSE = 10


@dataclasses.dataclass(frozen=True)
class VariablePlan:
    """One variable of a `ModelPlan`.

    Attributes:
        sparsity: its `sparsity.VariableSparsity`.
        architecture: `"allreduce"`, `"ps"` or `"allgather"`: how it travels.
        num_partitions: P on servers, else 1.
        costs: dict from each architecture that it can have to the
            `planning.TransferBytes` of a step.
        measured_bytes: bytes that a process sent and received in a step, on
            average over the processes; None if it was not measured.
    """

    sparsity: sparsity.VariableSparsity
    architecture: str
    num_partitions: int
    costs: dict
    measured_bytes: float | None = None

    @property
    def owner_balance(self):
        """Touches at the busiest owner over their mean; None if not spread."""
        shares = self.sparsity.owner_shares
        if not shares or not sum(shares):
            return None
        return max(shares) * len(shares)


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """How each variable of a model travels, and its cost.

    Attributes:
        variables: tuple of `VariablePlan`, in the model's order.
        cluster: the `planning.Cluster` that the costs are those of. For
            processes of one machine it is as many machines: the messages
            between them count.
        engine: the engine's name.
        comparison: the `StrategyPlan` of all ways to train the model; None if
            they were not compared.
        make_strategy: function of this plan and whether weights may be some
            updates old, to the best strategy.
    """

    variables: tuple
    cluster: planning.Cluster
    engine: str
    comparison: StrategyPlan | None = None
    make_strategy: collections.abc.Callable | None = None

    @property
    def strategies(self):
        """Tuple of the `StrategyCost`s of all ways, the fastest first."""
        return self.comparison.costs if self.comparison else ()

    def strategy(self, asynchronous=False):
        """Makes the fastest strategy; every rank calls it.

        Args:
            asynchronous: whether it may be one whose passes miss updates,
                which trains another model than one process does.

        Returns:
            `ks.HybridStrategy`, `ks.LayerPlacementStrategy` or
            `ks.PipelineStrategy`; in one process, with a plan for it, always
            `ks.HybridStrategy`. Make the model anew in its scope.

        Raises:
            ValueError: if the ways were not compared, or for another number of
                processes than run.
        """
        return self.make_strategy(self, asynchronous)

    @property
    def alpha_model(self):
        """The mean of alpha over the model, weighted by size (EuroSys 3.1)."""
        return planning.alpha_model([v.sparsity.spec() for v in self.variables])

    def bytes_of(self, architecture):
        """Bytes that the busiest machine moves by one architecture's path."""
        costs = [
            v.costs[architecture]
            for v in self.variables
            if v.architecture == architecture
        ]
        if not costs:
            return 0
        return functools.reduce(operator.add, costs).busiest_bytes

    def markdown(self):
        """The plan as a Markdown table, with a line about the whole model.

        P is the number of partitions on servers, balance the touches of the
        busiest owner over their mean; the last columns are the bytes that the
        busiest machine sends and receives in a step under each architecture,
        and the bytes counted at the engine, for a process on average.
        """
        return as_table(_HEAD, self._rows(), self._of_the_model())

    def print(self):
        """Shows the same on the terminal, and the comparison."""
        print_markdown(self.markdown())
        if self.comparison:
            self.comparison.print()

    def _rows(self):
        dense = [v for v in self.variables if v.sparsity.alpha is None]
        dense.sort(key=lambda v: -v.sparsity.spec().num_elements)
        unlisted = {id(v) for v in dense[_MOST_DENSE:]}
        for variable in self.variables:
            if id(variable) not in unlisted:
                yield _row(variable)
        if unlisted:
            yield _row_of_all(dense[_MOST_DENSE:])

    def _of_the_model(self):
        moved = ", ".join(
            f"{in_bytes(self.bytes_of(a))} by {a}"
            for a in transfer_cost.ARCHITECTURES
            if self.bytes_of(a)
        )
        return (
            f"alpha of the model: {self.alpha_model:.4g}. "
            f"Per step at the busiest of {self.cluster.num_machines} "
            f"machines of {self.cluster.processes_per_machine} (engine "
            f"{self.engine}), sent and received: {moved or 'nothing'}."
        )


def of_running(model):
    """The plan that a model is trained by, with the measurements so far.

    Every rank calls it, between two steps.

    Returns:
        `ModelPlan`, the same on all ranks.
    """
    placements = model.distribute_strategy.placements
    communicator = placements.communicator
    numbers = collections.Counter()
    plans = []
    for variable, facts in zip(
        model.trainable_variables, sparsity.measured(model), strict=True
    ):
        placement = placements.of(variable)
        is_of_rows = facts.alpha is not None
        reducer = placement.reducers[is_of_rows]
        path = reducer.path
        num_partitions = placement.num_partitions(communicator.size, is_of_rows)
        # Elsewhere, those that it would have on servers.
        on_servers = partitions_of(variable)
        if path in transfer_cost.PARTITIONED:
            on_servers = num_partitions
        spec = as_sent(facts.spec(on_servers), placements.options, communicator)
        traffic = Traffic.of(
            variable, placements, facts.largest_rows, numbers[reducer]
        )
        numbers[reducer] += 1
        costs = {
            name: planning.engine_bytes(spec, name, *traffic.facts())
            for name in transfer_cost.architectures_of(spec)
        }
        costs[path] = reducer.transfer_bytes(spec, traffic)
        plans.append(VariablePlan(facts, path, num_partitions, costs))
    cluster = running_cluster(communicator)
    return ModelPlan(tuple(plans), cluster, communicator.engine)


_HEAD = [
    *("variable", "shape", "size", "alpha", "architecture", "P", "balance"),
    *transfer_cost.ARCHITECTURES,
    "measured",
]


def _row(variable):
    facts = variable.sparsity
    balance = variable.owner_balance
    return [
        facts.name,
        " x ".join(map(str, facts.shape)) or "scalar",
        in_bytes(facts.spec().num_bytes()),
        "dense" if facts.alpha is None else f"{facts.alpha:.4g}",
        variable.architecture,
        _partitions(variable),
        "" if balance is None else f"{balance:.2f}",
        *_costs([variable]),
        _spell_bytes(variable.measured_bytes),
    ]


def _partitions(variable):
    if variable.architecture in transfer_cost.PARTITIONED:
        return str(variable.num_partitions)
    return ""


def _row_of_all(variables):
    num_bytes = sum(v.sparsity.spec().num_bytes() for v in variables)
    return [
        f"{len(variables)} smaller dense variables",
        "",
        in_bytes(num_bytes),
        "dense",
        ", ".join(sorted({v.architecture for v in variables})),
        "",
        "",
        *_costs(variables),
        _spell_bytes(
            sum(v.measured_bytes for v in variables)
            if all(v.measured_bytes is not None for v in variables)
            else None
        ),
    ]


def _spell_bytes(count):
    return "" if count is None else in_bytes(count)


def _costs(variables):
    costs = []
    for name in transfer_cost.ARCHITECTURES:
        of_each = [v.costs[name] for v in variables if name in v.costs]
        total = sum(cost.busiest_bytes for cost in of_each)
        costs.append(_spell_bytes(total if of_each else None))
    return costs
