"""Ordinary `Embedding`s of an adopted model that become tables."""

import logging

from keras_sparsity._tf import keras_models
from keras_sparsity.conversion.saving import tables_of
from keras_sparsity.layers import ordinary
from keras_sparsity.moves import moving
from keras_sparsity.optimizer import HybridOptimizer
from keras_sparsity.placement import choice
from keras_sparsity.tables.table_variable import TableVariable
from keras_sparsity.update import rules

# Set on a layer of which has been told why it stays whole.
_TOLD = "_keras_sparsity_told"


def settle(model, strategy):
    """Spreads the `Embedding`s that are to be tables, as is chosen.

    Notes of the others whether a placement for tables may be found for them.

    Args:
        model: the model, compiled.
        strategy: the `HybridStrategy`.
    """
    placements = strategy.placements
    if strategy.collectives.size == 1:
        return
    whole_rule = _rule_of_whole_tables(model)
    if whole_rule:
        _make_whole(model)
    for layer in _embeddings(model):
        variable = ordinary.weight_of(layer)
        why_not = ordinary.why_whole(layer) or whole_rule
        is_owned = placements.owns_rows_of(ordinary.num_bytes_of(layer))
        if why_not:
            if is_owned:
                _tell(layer, why_not, strategy)
        elif isinstance(variable, TableVariable):
            ordinary.take_over(layer)  # the weight of another layer
        elif is_owned:
            _spread(model, layer, placements)
        choice.may_be_owned(variable, not why_not)


def _spread(model, layer, placements):
    """Spreads an `Embedding` of which each rank has all rows."""
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, HybridOptimizer) and optimizer.built:
        # All ranks have rank 0's values by now, and slots of them.
        moving.move_for_now(model, [(ordinary.weight_of(layer), "ps")])
    else:
        ordinary.take_over(layer).shard(placements)


def _embeddings(model):
    """Built `Embedding`s of stock Keras that look up no table yet."""
    return [
        layer
        for layer in keras_models.all_layers(model)
        if ordinary.weight_of(layer) is not None
        and ordinary.lookup_of(layer) is None
    ]


def _rule_of_whole_tables(model):
    """Why the optimizer's rule needs whole tables; None if it does not."""
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, HybridOptimizer):
        return None
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    if rules.is_by_rows(optimizer):
        return None
    return f"the rule of {type(optimizer).__name__} needs the whole of it"


def _make_whole(model):
    """Gathers tables that `Embedding`s have begun with."""
    tables = [t for t in tables_of(model) if t.is_of_stock_layer]
    spread = {t: "allgather" for t in tables if t.is_sharded}
    if spread:
        moving.move(model, spread)


def _tell(layer, why_not, strategy):
    """Says once, on rank 0, that each process has a whole table."""
    if getattr(layer, _TOLD, False) or strategy.rank != 0:
        return
    object.__setattr__(layer, _TOLD, True)
    logging.getLogger(__name__).warning(
        "The table of '%s', %.3g MB, stays whole on every process: %s.",
        layer.name,
        ordinary.num_bytes_of(layer) / 1e6,
        why_not,
    )
