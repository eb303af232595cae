"""Where layer placement divides a model: rules, costs, and the plan."""

import dataclasses

from keras_sparsity.board.split_plan import SplitPlan
from keras_sparsity.data import batches
from keras_sparsity.stages import layer_placement
from keras_sparsity.stages.model_facts import named_places
from keras_sparsity.stages.split_costs import (
    fastest,
    of_data_parallelism,
    split_costs,
)


@dataclasses.dataclass(frozen=True)
class Splits:
    """The places where a head may end, as a strategy's options rate them.

    Args:
        rule, num_examples, threshold: as of `LayerPlacementStrategy`.
        engine: its name, see `planning.engine_bytes`.
        num_workers, num_tails: of the processes.
        is_star: whether the head's gradients are summed by tail workers.
        tail_split: what several tail workers divide; None: the cheaper one.
        is_by_worker: whether the tail computes parts one after the other.
    """

    rule: str
    num_examples: int
    threshold: float
    engine: str
    num_workers: int
    num_tails: int
    is_star: bool
    tail_split: str | None
    is_by_worker: bool = False

    @property
    def num_batch_examples(self):
        """Examples of a mini-batch of all workers."""
        return self.num_examples * self.num_workers

    def place(self, model):
        """The place by `rule`; None where the model gains nothing.

        Args:
            model: `Measurable`, for the running cluster.
        """
        if self.rule == "fastest":
            return fastest(self._costs(model.measured, self.num_batch_examples))
        return self._published(model)

    def why_none(self, model):
        """The reason why `place` finds none."""
        if self.rule != "published":
            why = "no split has a shorter predicted step"
            if model.measured.facts.pairs:
                why += " and whole mini-batches where pairs of examples count"
            return why
        sizes = layer_placement.layer_sizes(model.cutter)
        skewness = layer_placement.skewness(sizes)
        if skewness < self.threshold:
            return "no place behind its convolutions divides it"
        return (
            f"the skewness of its parameters is {skewness:.2f}, not below "
            f"threshold={self.threshold}"
        )

    def divides_columns(self, model, place):
        """Whether tail workers divide columns, for a head up to a place."""
        return self.tail_split == "columns" or any(
            cost.place == place and cost.tail_split == "columns"
            for cost in self._of_splits(model.measured, self.num_batch_examples)
        )

    def plan(self, model, chosen, batch):
        """The `SplitPlan` for mini-batches like one.

        Args:
            model: as for `place`.
            chosen: the place where it is divided; None if it is not.
            batch: a mini-batch.
        """
        num_examples = int(batches.num_examples(batch))
        costs = self._costs(model.measured, num_examples)
        profile = model.measured.facts.profile
        num_processes = self.num_workers + self.num_tails
        seconds = {
            None: sum(profile.pass_seconds(num_examples / num_processes))
        }
        for place in profile.crossing_bytes:
            of_head = num_examples / self.num_workers, slice(place + 1)
            seconds[place] = sum(profile.pass_seconds(*of_head))
        return SplitPlan(
            num_examples=num_examples,
            num_workers=self.num_workers,
            num_tails=self.num_tails,
            costs=tuple(costs),
            names={
                place: profile.names[place] for place in profile.crossing_bytes
            },
            worker_seconds=seconds,
            skewness=layer_placement.skewness(profile.sizes),
            threshold=self.threshold,
            chosen=chosen,
            published=self._published(model),
            fastest=fastest(costs),
            unknown_size=model.cutter.unknown_size,
        )

    def _published(self, model):
        return layer_placement.published_split(
            layer_placement.layer_sizes(model.cutter),
            self.num_examples,
            self.threshold,
            named_places(model.cutter),
        )

    def _costs(self, measured, num_examples):
        """Those of data parallelism, and of each place."""
        facts = measured.facts.with_batches(
            num_examples / self.num_batch_examples
        )
        whole = of_data_parallelism(
            facts, measured.cluster, num_examples, self.engine
        )
        return [whole, *self._of_splits(measured, num_examples)]

    def _of_splits(self, measured, num_examples):
        return split_costs(
            measured.facts.profile,
            self.num_workers,
            self.num_tails,
            num_examples,
            measured.cluster,
            is_star=self.is_star,
            tail_split=self.tail_split,
            pairs=measured.facts.pairs,
            is_by_worker=self.is_by_worker,
        )
