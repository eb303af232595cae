"""Which tables' rows are kept."""

import logging
import math

import tensorflow as tf

from keras_sparsity._tf import keras_optimizers
from keras_sparsity._tf.current_variable import (
    CurrentVariable,
    keeper_of,
    make_current,
)
from keras_sparsity.placement import choice
from keras_sparsity.update import lookups
from keras_sparsity.update.closed_form import closed_form_of
from keras_sparsity.update.kept_rows import KeptRows

# Slots that are not a rule's own.
_OF_ANY_RULE = {keras_optimizers.GRADIENT_SUMS, keras_optimizers.AVERAGES}


def keep(rule, pieces, slots, table, are_zero):
    """Has the rows of a table kept, if the rule has a closed form.

    Args:
        rule, pieces, slots, table, are_zero: as for `KeptRows`.

    Returns:
        None if they are; else why not.
    """
    if table.regularizer is not None:
        return "the gradient of its regularizer touches all of them"
    storages = [piece.value for piece in pieces]
    if any(keeper_of(v) is not None for v in storages):
        return "another optimizer, of this model or of another, keeps them"
    if any(getattr(v, "is_traced", True) for v in storages):
        # Which would read rows that are behind.
        return (
            "a function that reads it, as that of `predict` of a model that "
            "is not compiled, was traced before the optimizer was built; call "
            "`optimizer.build(variables)` before"
        )
    forms = [closed_form_of(rule, piece) for piece in pieces]
    is_known = (
        forms[0] is not None
        and all(form == forms[0] for form in forms)
        and set(slots) - _OF_ANY_RULE == set(forms[0].factors)
    )
    of_slots = [slot.value for of_kind in slots.values() for slot in of_kind]
    if not is_known or not all(
        isinstance(make_current(slot), CurrentVariable) for slot in of_slots
    ):
        return "no closed form is known of its rule with these options"
    KeptRows(rule, forms[0], pieces, slots, table, are_zero)
    return None


def tell_of_whole_updates(variable, num_slots, why):
    """Logs, on rank 0, that each step costs as much as the table is large."""
    if choice.entered().communicator.rank != 0:
        return
    num_bytes = math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
    logging.getLogger(__name__).warning(
        "Each step updates all %d rows of the table '%s', %.3g MB with its "
        "slots: %s. See `sparse_updates` of `ks.HybridOptimizer`.",
        variable.shape[0],
        lookups.owner_of(variable).owner_name,
        num_bytes * (1 + num_slots) / 1e6,
        why,
    )
