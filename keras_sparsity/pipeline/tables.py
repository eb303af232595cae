"""Tables of a stage: their rows are spread over the stage's ranks.

Those of a `SampledSoftmax`, in a tail on one rank, are whole on that rank.
"""

from keras_sparsity._tf import keras_models
from keras_sparsity._tf.deferred_weights import initialize
from keras_sparsity.conversion.saving import tables_of
from keras_sparsity.layers import SampledSoftmax
from keras_sparsity.placement import choice
from keras_sparsity.placement.alone import Alone
from keras_sparsity.tables import whole
from keras_sparsity.tables.table_variable import TableVariable
from keras_sparsity.update import optimizer_arguments, rules


class Placements(choice.Placements):
    """Where the variables of a rank's stage live.

    All but those of spread tables are updated alone: their gradients are
    those of all of the stage's ranks already.
    """

    is_of_strategy = True

    def __init__(self, strategy):
        super().__init__("hybrid", strategy.peers, strategy.options, strategy)
        self._alone = Alone()

    def of(self, variable):
        return variable.table.placement if is_spread(variable) else self._alone


def is_spread(variable):
    """Whether a rank has some rows of a variable alone."""
    return isinstance(variable, TableVariable) and variable.table.is_sharded


def spread(model, weights, strategy):
    """Gives a stage's weights their first values, and spreads its tables.

    All ranks call it. A table that was made outside of `strategy.scope()`, and
    is spread over all ranks, is whole on each of them meanwhile.
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
        is_new: whether the model was compiled with another one, or none,
            before.
    """
    for number, part in enumerate(parts):
        is_alone = strategy.stages_of_ranks.count(number) == 1
        _check_part(optimizer, part.model, is_alone, is_new)


def _check_part(optimizer, model, is_alone, is_new):
    trained = {id(variable) for variable in model.trainable_variables}
    for table in tables_of(model):
        will_be_spread = not is_alone and choice.begins_spread(table)
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


def check_places(parts, strategy):
    """Raises ValueError for a table where it cannot live.

    That of a `SampledSoftmax` is in a tail on one rank, whole; all others are
    in the head.
    """
    head, *others = parts
    for layer in _softmaxes(head.model) if others else []:
        raise ValueError(
            "A `SampledSoftmax` draws a sample for the whole batch, which the "
            f"tail alone sees. Received: '{layer.name}' in the head of the "
            f"layers {list(head.names)}. Divide the model in front of it "
            "(`stages`), or train under `ks.HybridStrategy`."
        )
    for number, part in enumerate(others, start=1):
        num_ranks = strategy.stages_of_ranks.count(number)
        _check_tables_of_tail(part, num_ranks)


def _check_tables_of_tail(part, num_ranks):
    softmaxes = _softmaxes(part.model)
    of_softmaxes = [id(table) for each in softmaxes for table in each.tables]
    for table in tables_of(part.model):
        if id(table) not in of_softmaxes:
            raise ValueError(
                "Sharded tables live on the workers, which train the head; "
                "those of a `SampledSoftmax` alone in the tail. "
                f"Received: '{table.owner_name}' in the tail of the layers "
                f"{list(part.names)}. Divide the model behind it (`stages`), "
                "or train under `ks.HybridStrategy`."
            )
    if softmaxes and num_ranks > 1:
        raise ValueError(
            "A `SampledSoftmax` has all of its classes on one tail worker. "
            f"Received: '{softmaxes[0].name}' in the tail of {num_ranks} "
            "processes. Expected: num_tail_workers=1. Or train under "
            "`ks.HybridStrategy`, which spreads the classes over all processes."
        )


def check_not_tied(model):
    """Raises ValueError if a softmax has the table of an embedding.

    Also where no rule divides the model: what is refused does not depend on
    measurements, or the number of processes.
    """
    for layer in _softmaxes(model):
        if layer.table is not None:
            raise ValueError(
                f"The kernel of '{layer.name}' is the table of "
                f"'{layer.table.name}' (tied weights), but the workers have "
                "the embedding, and the tail worker has the softmax. "
                "Received: a SampledSoftmax with `table`. Leave out `table`, "
                "or train under `ks.HybridStrategy`."
            )


def _softmaxes(model):
    """The `SampledSoftmax` layers of a model, also of models in it."""
    layers = keras_models.all_layers(model)
    return [layer for layer in layers if isinstance(layer, SampledSoftmax)]
