"""The facts of a model and the costs of a strategy, as data."""

import dataclasses

from keras_sparsity.stages.planned_cuts import PlannedCuts
from keras_sparsity.stages.profile import Profile

DATA_PARALLELISM = "data parallelism"
LAYER_PLACEMENT = "layer placement"
PIPELINE = "pipeline"
WAYS = DATA_PARALLELISM, LAYER_PLACEMENT, PIPELINE


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """A model, as far as the costs of its training depend on it.

    Attributes:
        profile: its `Profile`, with `update_seconds`. Where it has no possible
            cuts, the model is trained by data parallelism alone.
        forward_share: the time of a forward pass, over that of the forward
            and the backward pass.
        returned_bytes: dict from a cut's place to the bytes of gradients that
            cross it, of one example.
        weight_bytes: tuple of the bytes of the calls' weights, tables whole.
        output_bytes: tuple of the bytes that the calls make of one example.
        num_slots: slots of the optimizer for each trained weight.
        num_averages: values that `"spectrain"` keeps for each trained weight.
        specs: tuple of the `planning.VariableSpec`s of the trained variables,
            as they travel.
        pairs: tuple of the places of the calls that compute with pairs of
            examples: they take whole mini-batches.
    """

    profile: Profile
    forward_share: float
    returned_bytes: dict
    weight_bytes: tuple
    output_bytes: tuple
    num_slots: float
    num_averages: int
    specs: tuple
    pairs: tuple = ()

    @property
    def has_tables(self):
        """Whether there are sharded tables, which no pipeline trains."""
        return any(each.owned for each in self.profile.gradients)

    @property
    def has_samples(self):
        """Whether there is a `SampledSoftmax`, which one tail worker has."""
        return any(each.has_samples for each in self.profile.gradients)

    def with_batches(self, factor):
        """These facts with so many times the rows that a batch looks up."""
        specs = tuple(
            dataclasses.replace(spec, alpha=min(1.0, factor * spec.alpha))
            if spec.is_sparse
            else spec
            for spec in self.specs
        )
        return dataclasses.replace(self, specs=specs)

    def crowded(self, factor):
        """These facts of processes that slow each other by a factor."""
        return dataclasses.replace(self, profile=self.profile.crowded(factor))

    def state_bytes(self, calls, num_copies=0, num_owners=1, spread=None):
        """Weights, gradients, slots, and more copies of trained weights.

        Args:
            calls: a slice.
            num_copies: the number of these copies.
            num_owners: the number of processes that share sharded tables.
            spread: set of the names of the tables that they share; by default
                all.
        """
        weights, trained = sum(self.weight_bytes[calls]), 0
        for gradient in self.profile.gradients[calls]:
            trained += gradient.parameter_bytes
            for rows in gradient.owned:
                if spread is not None and rows.table not in spread:
                    continue  # each process has the whole table
                elsewhere = rows.table_bytes - rows.largest_bytes(num_owners)
                weights -= elsewhere
                trained -= elsewhere * bool(rows.pushed_bytes)
        return weights + (1 + self.num_slots + num_copies) * trained


@dataclasses.dataclass(frozen=True)
class StrategyCost:
    """A predicted step of one way to train a model.

    Attributes:
        way: `"data parallelism"`, `"layer placement"` or `"pipeline"`.
        step_seconds: the predicted time of a step.
        computation_seconds: the part of it in which the busiest processor
            computes, sends and receives.
        link_seconds: the time in which the busiest link carries messages.
        busiest_bytes: bytes of a step on the busiest link, in one direction.
        memory_bytes: tuple of the bytes of a process: of data parallelism one
            number, else one for each stage.
        missed_updates: updates of earlier mini-batches that a forward pass
            comes before, at most: the staleness.
        fits: whether the memory of a process is enough.
        schedule: of a pipeline.
        stages: tuple of the names of the stages' last layers, without the last
            stage's; as Keras numbered them in the model that was planned.
        cuts: `PlannedCuts` after these layers.
        num_replicas: processes of a stage; of layer placement those of the
            head.
        ranks_of_stages: tuple of the numbers of the stages' processes, if they
            differ; `num_replicas` is 1 then, the one pipeline.
        num_tails: tail workers, and
        tail_split: what several of them divide, "batch" or "columns".
        num_micro_batches: parts of a mini-batch.
        messages_ahead: whether messages travel during a step of their own.
    """

    way: str
    step_seconds: float
    computation_seconds: float
    link_seconds: float
    busiest_bytes: float
    memory_bytes: tuple
    missed_updates: int = 0
    fits: bool = True
    schedule: str | None = None
    stages: tuple = ()
    cuts: PlannedCuts | None = dataclasses.field(default=None, repr=False)
    num_replicas: int = 1
    ranks_of_stages: tuple = ()
    num_tails: int = 0
    tail_split: str = "batch"
    num_micro_batches: int = 1
    messages_ahead: bool = False

    @property
    def is_exact(self):
        """Whether the result is that of one process."""
        return self.missed_updates == 0

    @property
    def bound(self):
        """The limit that it hits: "memory", "link" or "computation"."""
        if not self.fits:
            return "memory"
        is_of_link = self.link_seconds > self.computation_seconds
        return "link" if is_of_link else "computation"


def does_fit(cost, cluster):
    """Whether the memory of a process, if it is known, is enough."""
    limit = cluster.memory_bytes
    return limit is None or max(cost.memory_bytes) <= limit


def fastest_that_fits(costs, cluster):
    """Of `StrategyCost`s, the fastest first, the one to choose.

    The first that fits the memory of a process; if none does, that of the
    least memory.
    """
    too_large = []
    for cost in costs:
        if does_fit(cost, cluster):
            return cost
        too_large.append(cost)
    return min(too_large, key=lambda cost: max(cost.memory_bytes))
