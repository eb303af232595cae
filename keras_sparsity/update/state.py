"""The state of a stock optimizer, as the ranks store it."""

import keras

from keras_sparsity.tables import whole
from keras_sparsity.update.rows import slots_of


def places(rule, optimizer, variables):
    """How each variable of a stock optimizer's state is stored here.

    Args:
        rule: the Keras optimizer that updates variables.
        optimizer: the same, or the loss scaling around it.
        variables: list of `(variable, pieces)`: the model's variables, and
            those that the rule updates in their place.

    Returns:
        List of `(table, pieces)`, in the order in which the stock optimizer
        has them; `table` is None for variables that are not spread.
    """
    whole_of = {}
    for variable, pieces in variables:
        if pieces[0] is variable:
            continue
        for slots in slots_of(rule, pieces).values():
            whole_of[id(slots[0])] = (variable.table, slots)
            for slot in slots[1:]:
                whole_of[id(slot)] = None
    found = [whole_of.get(id(v), (None, [v])) for v in optimizer.variables]
    return [place for place in found if place is not None]


def read(places):
    """Arrays of whole variables, as a stock optimizer has them."""
    return [
        keras.ops.convert_to_numpy(pieces[0])
        if table is None
        else whole.read_like(table, pieces)
        for table, pieces in places
    ]


def assign(places, values):
    """Gives the variables arrays as `read` returns them."""
    if len(values) != len(places):
        raise ValueError(
            "The saved optimizer has another number of variables. "
            f"Received: {len(values)}. Expected: {len(places)}."
        )
    for (table, pieces), value in zip(places, values, strict=True):
        if table is None:
            pieces[0].assign(value[...])
        else:
            whole.assign_like(table, pieces, value[...])
