"""Tables of a stage: their rows are spread over the stage's ranks."""

from keras_sparsity._tf.deferred_weights import initialize
from keras_sparsity.conversion.saving import tables_of
from keras_sparsity.placement import choice
from keras_sparsity.placement.alone import Alone
from keras_sparsity.tables import whole
from keras_sparsity.tables.table_variable import TableVariable
from keras_sparsity.update import optimizer_arguments, rules


class Placements(choice.Placements):
    """Where the variables of a rank's stage live.

    All but those of spread tables are updated alone: their gradients are
    those of all of the stage's ranks already.

    Args:
        strategy: the `StagedStrategy`.
    """

    is_of_strategy = True

    def __init__(self, strategy):
        super().__init__("hybrid", strategy.peers, strategy.options, strategy)
        self._alone = Alone()

    def of(self, variable):
        return variable.placement if is_spread(variable) else self._alone


def is_spread(variable):
    """Whether a rank has some rows of a variable alone."""
    return isinstance(variable, TableVariable) and variable.table.is_sharded


def spread(model, weights, strategy):
    """Gives a stage's weights their first values, and spreads its tables.

    All ranks call it. A table that was made outside of `strategy.scope()`, and
    is spread over all ranks, is whole on each of them meanwhile.

    Args:
        model: the model.
        weights: those of the rank's stage.
        strategy: the `StagedStrategy`.
    """
    placements = Placements(strategy)
    own = {id(variable) for variable in weights}
    with choice.entering(placements):
        for table in tables_of(model):
            if table.collectives is strategy.peers:
                continue  # since an earlier `compile`
            whole.collect(table)
            if id(table.variable) in own:
                initialize([table.variable])
                table.shard(placements)
        initialize(weights)


def check(optimizer, parts, strategy, is_new=True):
    """Raises ValueError for tables that cannot be spread or trained so.

    On all ranks, before any of them waits for the others.

    Args:
        optimizer: that of a compiled model, or None.
        parts: the `Part`s of all stages.
        strategy: the `StagedStrategy`.
        is_new: whether the model was compiled with another one, or none,
            before.
    """
    head = parts[0].model
    trained = {id(variable) for variable in head.trainable_variables}
    is_alone = strategy.stages_of_ranks.count(0) == 1
    for table in tables_of(head):
        will_be_spread = not is_alone and (
            table.requested_architecture in (None, "ps", "auto")
        )
        if will_be_spread:
            table.check_can_be_spread()
        if optimizer is None or id(table.variable) not in trained:
            continue
        rule = optimizer_arguments.rule_of(optimizer)
        if will_be_spread and is_new and rule.built:
            raise ValueError(
                "An optimizer that is built has slots of whole tables, and "
                "cannot go on with parts of them. Received: an optimizer that "
                f"is built, and the table '{table.owner_name}'. Give `compile` "
                "a new one; `keras.models.load_model` in the scope, or "
                "`ks.callbacks.ShardedCheckpoint`, gives it its state."
            )
        optimizer_arguments.check_is_rule(optimizer)
        rules.check_applies_by_rows(rule)


def check_places(parts):
    """Raises ValueError if a stage behind the first one has a table."""
    for part in parts[1:]:
        tables = tables_of(part.model)
        if tables:
            raise ValueError(
                "Sharded tables live on the workers, which train the head. "
                f"Received: '{tables[0].owner_name}' in the tail of the layers "
                f"{list(part.names)}. Divide the model behind it (`stages`), "
                "or train under `ks.HybridStrategy`."
            )
