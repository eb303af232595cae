"""The ranks that have each variable of a model in stages, for checkpoints."""

import functools

import keras

from keras_sparsity.checkpoint import state
from keras_sparsity.pipeline.tables import is_spread
from keras_sparsity.pipeline.weights import places_among_all
from keras_sparsity.update import lookups


class SavedState:
    """The state of a model whose stages live on the ranks.

    In the order of one process; also an optimizer's slots, as those of all
    weights would stand.

    Args:
        model: an adopted model, with its optimizer built.
        parts: the `Part`s of all stages.
        steps: the model's `Steps`.
        updates: the rank's `Updates`.
        versions: `Versions`, for training without a flush; else None.
    """

    def __init__(self, model, parts, steps, updates, versions):
        self._model, self._steps, self._versions = model, steps, versions
        self._updates = updates
        self._optimizer = model.optimizer
        strategy = model.distribute_strategy
        self._collectives = strategy.collectives
        self._own = parts[
            strategy.stages_of_ranks[strategy.rank]
        ].model.trainable_variables
        of_stages = [
            tuple(
                rank
                for rank, stage in enumerate(strategy.stages_of_ranks)
                if stage == number
            )
            for number in range(len(parts))
        ]
        self._ranks_of_last = of_stages[-1]
        self._ranks = {
            id(variable): ranks
            for part, ranks in zip(parts, of_stages, strict=True)
            for variable in part.model.variables
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
        own, slots = self._slots
        return [
            self._entry_of_pieces(
                "optimizer", description, *own.get(place, (None, [])), ranks
            )
            for place, (ranks, description) in enumerate(slots)
        ]

    @functools.cached_property
    def _slots(self):
        """The optimizer's variables, by their places among those of all ranks.

        Returns:
            own: dict from the places of this rank's to `(table, pieces)`.
            slots: list of `(ranks, (name, shape, dtype))`.
        """
        number, places = places_among_all(self._optimizer, self._updates)
        own = dict(zip(places, self._updates.places, strict=True))
        described = {place: _described(*of) for place, of in own.items()}
        of_ranks = self._collectives.gather_objects(
            (not self._own, described), name="pipeline/slots"
        )
        # Last those that train no variable: their optimizers count no steps.
        order = sorted(range(len(of_ranks)), key=lambda rank: of_ranks[rank][0])
        slots = []
        for place in range(number):
            ranks = tuple(r for r in order if place in of_ranks[r][1])
            slots.append((ranks, of_ranks[ranks[0]][1][place]))
        return own, slots

    def _of_metrics(self):
        """Each rank of the last stage counts whole batches."""
        return [
            self._entry("metrics", variable, self._ranks_of_last)
            for variable in self._model.metrics_variables
        ]

    def _of_predictions(self):
        """The averages of the weights' changes, if weights are predicted so."""
        if self._versions is None or not self._versions.has_averages:
            return []
        self._versions.settle()
        return [
            self._entry(
                "prediction",
                variable,
                self._ranks[id(variable)],
                self._versions.average,
            )
            for variable in self._model.trainable_variables
        ]

    def _entry(self, section, variable, ranks, held=None, is_replicated=True):
        """The `Entry` of a variable of the model, or of one that it `held`."""
        is_here = self._collectives.rank in ranks
        if is_spread(variable):
            table = variable.table
            described = _described(table, [variable])
            pieces = table.partitions
            return self._entry_of_pieces(
                section, described, table, pieces, ranks
            )
        found = variable if held is None or not is_here else held(variable)
        return state.Entry(
            section,
            variable.path,
            tuple(variable.shape),
            _dtype(variable),
            [found] if is_here else [],
            is_replicated=is_replicated,
            ranks=ranks,
        )

    @staticmethod
    def _entry_of_pieces(section, described, table, pieces, ranks):
        """The `Entry` of a variable, or of a table's partitions."""
        layout = table and table.layout
        return state.Entry(
            section, *described, pieces, layout, ranks=None if layout else ranks
        )


def _described(table, pieces):
    """The name, shape and dtype of a variable as one process has it."""
    first = pieces[0]
    shape = tuple(first.shape)
    if table is not None:
        shape = (table.num_rows, *shape[1:])
    return first.path, shape, _dtype(first)


def _dtype(variable):
    return keras.backend.standardize_dtype(variable.dtype)
