"""The ranks that have each variable of a model in stages, for checkpoints."""

import functools

from keras_sparsity._tf import keras_losses
from keras_sparsity.checkpoint import state
from keras_sparsity.pipeline.slots import Slots
from keras_sparsity.pipeline.tables import is_spread
from keras_sparsity.update import lookups


class SavedState:
    """The state of a model whose stages live on the ranks.

    In the order of one process; also an optimizer's slots, as those of all
    weights would stand.
    """

    def __init__(self, model, parts, steps, updates):
        self._model, self._steps, self._updates = model, steps, updates
        self._optimizer = model.optimizer
        strategy = model.distribute_strategy
        self._collectives = strategy.collectives
        of_stages = [strategy.ranks_of(stage) for stage in range(len(parts))]
        self._ranks_of_last = of_stages[-1]
        self._ranks = {
            id(variable): ranks
            for part, ranks in zip(parts, of_stages, strict=True)
            for variable in [
                *part.model.variables,
                *part.model.metrics_variables,
            ]
        }
        object.__setattr__(model, state.OF_STAGES, self.entries)

    def entries(self):
        """List of `state.Entry`; every rank calls it.

        All mini-batches under way come back first.
        """
        self._steps.settle()
        for keeper in lookups.keepers_of(self._updates.own_built):
            # A run that goes on from files has all rows up to date, too.
            keeper.settle()
        found = self._of_model()
        if self._optimizer is not None:
            found += self._of_optimizer() + self._of_metrics()
        return found + self._of_predictions()

    def _of_model(self):
        trainable = {id(v) for v in self._model.trainable_variables}
        return [
            self._entry(
                "model",
                variable,
                self._ranks[id(variable)],
                # Random states and the like may differ in a stage.
                is_replicated=id(variable) in trainable,
            )
            for variable in self._model.variables
        ]

    def _of_optimizer(self):
        own = self._slots.own
        return [
            self._entry_of_pieces(
                "optimizer", description, *own.get(place, (None, [])), ranks
            )
            for place, (ranks, description) in enumerate(self._slots.of_all)
        ]

    @functools.cached_property
    def _slots(self):
        return Slots(self._optimizer, self._updates, self._collectives)

    def _of_metrics(self):
        """Each rank of the last stage counts whole batches.

        Of the losses of outputs, and of what layers count, each rank of a
        stage has its part.
        """
        losses = keras_losses.loss_metrics(self._model)
        in_parts = {*self._ranks, *(id(v) for m in losses for v in m.variables)}
        return [
            self._entry(
                "metrics",
                variable,
                self._ranks.get(id(variable), self._ranks_of_last),
                is_replicated=id(variable) not in in_parts,
            )
            for variable in self._model.metrics_variables
        ]

    def _of_predictions(self):
        """The averages of the weights' changes, if weights are predicted so."""
        predictor = self._updates.predictor
        if predictor is None or not predictor.num_averages:
            return []
        predictor.settle()
        return [
            self._entry(
                "prediction",
                variable,
                self._ranks[id(variable)],
                predictor.average,
            )
            for variable in self._model.trainable_variables
        ]

    def _entry(self, section, variable, ranks, held=None, is_replicated=True):
        """The `Entry` of a variable of the model, or of one that it `held`."""
        is_here = self._collectives.rank in ranks
        if is_spread(variable):
            table = variable.table
            description = state.described(table, [variable])
            pieces = table.partitions
            return self._entry_of_pieces(
                section, description, table, pieces, ranks
            )
        found = variable if held is None or not is_here else held(variable)
        return state.Entry(
            section,
            *state.described(None, [variable]),
            [found] if is_here else [],
            is_replicated=is_replicated,
            ranks=ranks,
        )

    @staticmethod
    def _entry_of_pieces(section, description, table, pieces, ranks):
        """The `Entry` of a variable, or of a table's partitions."""
        layout = table and table.layout
        return state.Entry(
            section,
            *description,
            pieces,
            layout,
            ranks=None if layout else ranks,
        )
