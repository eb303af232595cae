"""The plan of a model: how sparse its variables are, and how each travels."""

import contextlib
import dataclasses
import functools
import operator

import keras
import rich.box
import rich.console
import rich.table
import rich.text
import tensorflow as tf
from rich import filesize

from keras_sparsity import (
    architectures,
    checks,
    collectives,
    planning,
    sparsity,
    touches,
)
from keras_sparsity.aggregation import Aggregation, is_all_reduced
from keras_sparsity.data.batches import split_batch
from keras_sparsity.planning import transfer_cost
from keras_sparsity.tables.table_variable import TableVariable, pieces_of

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
        measured_bytes: what a process sent and received for it in a step, on
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
    """How each variable of a model travels, and what it costs.

    Attributes:
        variables: tuple of `VariablePlan`, in the model's order.
        cluster: the `planning.Cluster` that the costs are those of. For
            processes of one machine it is as many machines: what they send
            each other counts.
        engine: the engine's name.
    """

    variables: tuple
    cluster: planning.Cluster
    engine: str

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
        and what was counted at the engine, for a process on average.
        """
        head, *rows = self._rows()
        lines = [_line(head), _line(["---"] * len(head)), *map(_line, rows)]
        return "\n".join([*lines, "", self._of_the_model()])

    def print(self):
        """Shows the same on the terminal."""
        print_markdown(self.markdown())

    def _rows(self):
        dense = [v for v in self.variables if v.sparsity.alpha is None]
        dense.sort(key=lambda v: -v.sparsity.spec().num_elements)
        unlisted = {id(v) for v in dense[_MOST_DENSE:]}
        yield _HEAD
        for variable in self.variables:
            if id(variable) not in unlisted:
                yield _row(variable)
        if unlisted:
            yield _row_of_all(dense[_MOST_DENSE:])

    def _of_the_model(self):
        moved = ", ".join(
            f"{filesize.decimal(round(self.bytes_of(a)))} by {a}"
            for a in transfer_cost.ARCHITECTURES
            if self.bytes_of(a)
        )
        return (
            f"alpha of the model: {self.alpha_model:.4g}. "
            f"Per step at the busiest of {self.cluster.num_machines} "
            f"machines of {self.cluster.processes_per_machine} (engine "
            f"{self.engine}), sent and received: {moved or 'nothing'}."
        )


def print_markdown(text):
    """Shows Markdown on the terminal, its one table as wide as need be."""
    lines = [_cells(line) for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = lines
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(rich.text.Text, row))
    console = rich.console.Console()
    if not console.is_terminal:  # a file, which is as wide as needed
        console = rich.console.Console(width=200)
    before, _, after = text.partition("|")
    after = "\n".join(x for x in after.splitlines()[1:] if x[:1] != "|")
    for part in (before, table, after):
        if not isinstance(part, str) or part.strip():
            is_text = isinstance(part, str)
            console.print(
                part.strip() if is_text else part,
                highlight=False,
                markup=False,
            )


def _cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def plan(model, dataset, cluster=None, engine=None, num_batches=8):
    """Measures a model's sparsity without training it, and prints its plan.

    Some batches go through the model and back; no variable changes. For each
    variable the architecture is the one with the fewest bytes on the network,
    see `ks.planning.plan`.

    Every rank calls it; rank 0 prints. In one process the plan can be that of
    another cluster: each batch is then cut in as many parts as it has workers.

    Args:
        model: a compiled model.
        dataset: `tf.data.Dataset` of global batches, as `fit` takes them.
        cluster: the `ks.planning.Cluster` to plan for. By default that of the
            running processes; those of one machine count as machines of one
            process each, for what they send each other is not free.
        engine: "native" or "horovod"; by default the running one, in one
            process "native".
        num_batches: how many batches to look at.

    Returns:
        `ModelPlan`, the same on all ranks.

    Example:

    >>> import keras, numpy as np, tensorflow as tf, keras_sparsity as ks
    >>> model = keras.Sequential([
    ...     keras.Input((2,), dtype="int32"),
    ...     ks.layers.ShardedEmbedding(1000, 4, name="words"),
    ...     keras.layers.Flatten(),
    ...     keras.layers.Dense(1, use_bias=False, name="out"),
    ... ])
    >>> model.compile("sgd", "mse")
    >>> data = tf.data.Dataset.from_tensor_slices(
    ...     (np.arange(24).reshape(12, 2), np.zeros((12, 1)))).batch(4)
    >>> cluster = ks.planning.Cluster(num_machines=4)
    >>> found = ks.plan(model, data, cluster, engine="horovod")
    ... # doctest: +ELLIPSIS
    <BLANKLINE>
    ...
    >>> [(v.architecture, v.sparsity.alpha) for v in found.variables]
    [('ps', 0.002), ('allreduce', None)]

    References:
        EuroSys 3.1 (the hybrid architecture).
    """
    communicator = collectives.current()
    checks.check(
        isinstance(model, keras.Model) and getattr(model, "compiled", False),
        "model",
        model,
        "a compiled `keras.Model`: its loss says what has a gradient",
    )
    checks.check(
        isinstance(dataset, tf.data.Dataset),
        "dataset",
        dataset,
        "a `tf.data.Dataset` of global batches, as `fit` takes them",
    )
    num_batches = checks.dimension("num_batches", num_batches)
    if cluster is not None:
        planning.specs.check_is(cluster, planning.Cluster, "cluster")
    if cluster is not None and communicator.size not in (1, cluster.size):
        raise ValueError(
            f"The plan is for {cluster.size} processes, and there are "
            f"{communicator.size}. Received: cluster={cluster}. Call "
            "`ks.plan` in one process to plan for another cluster."
        )
    cluster = cluster or running_cluster(communicator)
    if engine is not None:  # before the batches are looked at
        checks.one_of("engine", engine, planning.transfer_cost.ENGINES)
    else:
        engine = "native" if communicator.size == 1 else communicator.engine
    variables = model.trainable_variables
    with touches.apart(variables):
        _look_at(model, dataset.take(num_batches), cluster, communicator)
        measured = sparsity.measured(model)
    strategy = getattr(model, "distribute_strategy", None)
    chosen = planning.plan(
        [as_sent(facts.spec(), strategy) for facts in measured],
        cluster,
        engine=engine,
    )
    found = ModelPlan(
        tuple(
            VariablePlan(
                facts,
                choice.architecture,
                planning.transfer_cost.num_partitions(choice.variable, cluster),
                choice.costs,
            )
            for facts, choice in zip(measured, chosen.choices, strict=True)
        ),
        cluster,
        engine,
    )
    if communicator.rank == 0:
        found.print()
    return found


def running_cluster(communicator):
    if communicator.cross_size == 1:
        return planning.Cluster(communicator.size)
    return planning.Cluster(communicator.cross_size, communicator.local_size)


def _look_at(model, dataset, cluster, communicator):
    """Has the gradients of some batches brought together, and thrown away."""
    variables = model.trainable_variables
    aggregation = Aggregation(variables, [pieces_of(v) for v in variables])

    def look(batch):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = model.compute_loss(x, y, outputs, sample_weight)
        grads = tape.gradient(loss, variables)
        found = [
            (gradient, variable)
            for gradient, variable in zip(grads, variables, strict=True)
            if gradient is not None
        ]
        aggregation.aggregate(*zip(*found, strict=True), lambda variable: False)

    run = model.distribute_strategy.run if communicator.size > 1 else _call
    step = tf.function(lambda batch: run(look, args=(batch,)))
    # Those of this rank, of one for each worker there is to be.
    parts = [(communicator.rank, communicator.size)]
    if communicator.size == 1:
        parts = [(part, cluster.size) for part in range(cluster.size)]
    with _left_as_it_was(model):
        for batch in dataset:
            for part in parts:
                step(split_batch(batch, *part))


def _call(function, args):
    return function(*args)


@contextlib.contextmanager
def _left_as_it_was(model):
    """Gives back what a forward pass in training changes."""
    state = [
        variable
        for variable in model.non_trainable_variables + model.metrics_variables
        if not isinstance(variable, TableVariable)
    ]
    before = [keras.ops.convert_to_numpy(variable) for variable in state]
    try:
        yield
    finally:
        for variable, value in zip(state, before, strict=True):
            variable.assign(value)


def as_sent(spec, strategy):
    """A `VariableSpec` in the dtype in which it travels."""
    wire = architectures.wire(spec.dtype, strategy)
    return dataclasses.replace(spec, dtype=wire.dtype.name)


def pulled_bytes_of(variable):
    """Of a row of a table, as its owner sends it; None if that is not known."""
    return getattr(getattr(variable, "table", None), "pulled_bytes", None)


def of_running(model):
    """The plan that a model is trained by, with what was measured so far.

    Every rank calls it, between two steps.

    Returns:
        `ModelPlan`, the same on all ranks.
    """
    communicator = collectives.current()
    cluster = running_cluster(communicator)
    strategy = model.distribute_strategy
    of_dense = architectures.of(strategy)
    variables = []
    num_served = 0
    measured = sparsity.measured(model)
    for variable, facts in zip(
        model.trainable_variables, measured, strict=True
    ):
        num_partitions, first_machine = 1, 0
        if pieces_of(variable)[0] is not variable:
            architecture = "ps"
            num_partitions = variable.table.layout.num_partitions
        elif is_all_reduced(variable, strategy):
            architecture = "allreduce"
        elif facts.alpha is not None:
            architecture = "allgather"
        else:
            architecture = of_dense.dense
            if of_dense.merges:
                num_partitions = communicator.size
            else:
                machine = num_served % communicator.size
                first_machine = machine % cluster.num_machines
                num_served += 1
        spec = facts.spec(num_partitions)
        sent = as_sent(spec, strategy)
        costs = {
            name: planning.engine_bytes(
                sent,
                name,
                cluster,
                communicator.engine,
                facts.largest_rows,
                first_machine,
                architectures.aggregates_locally(strategy),
                pulled_bytes_of(variable),
            )
            for name in transfer_cost.ARCHITECTURES
            if spec.is_sparse or name != "allgather"
        }
        variables.append(
            VariablePlan(facts, architecture, num_partitions, costs)
        )
    return ModelPlan(tuple(variables), cluster, communicator.engine)


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
        filesize.decimal(facts.spec().num_bytes()),
        "dense" if facts.alpha is None else f"{facts.alpha:.4g}",
        variable.architecture,
        str(variable.num_partitions) if variable.architecture == "ps" else "",
        "" if balance is None else f"{balance:.2f}",
        *_costs([variable]),
        _spell_bytes(variable.measured_bytes),
    ]


def _row_of_all(variables):
    num_bytes = sum(v.sparsity.spec().num_bytes() for v in variables)
    return [
        f"{len(variables)} smaller dense variables",
        "",
        filesize.decimal(num_bytes),
        "dense",
        "allreduce",
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
    return "" if count is None else filesize.decimal(round(count))


def _costs(variables):
    costs = []
    for name in transfer_cost.ARCHITECTURES:
        of_each = [v.costs[name] for v in variables if name in v.costs]
        total = sum(cost.busiest_bytes for cost in of_each)
        costs.append(_spell_bytes(total if of_each else None))
    return costs


def _line(cells):
    return "| " + " | ".join(cells) + " |"
