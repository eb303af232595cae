"""Ordinary `Embedding`s, of whose variable a step reads rows alone."""

import typing

import keras

from keras_sparsity._tf import keras_variables
from keras_sparsity._tf.current_variable import CurrentVariable, keeper_of
from keras_sparsity.tables.table_variable import TableVariable, pieces_of

# Set on the variable of an `Embedding`.
_ATTRIBUTE = "_keras_sparsity_lookup"


class Lookup(typing.NamedTuple):
    """Facts of an `Embedding`, named like those of a `ShardedTable`.

    Attributes:
        num_rows: number of rows.
        has_replicas: whether other ranks have the same rows.
        regularizer: of its variable, or None.
        owner_name: the layer's name.
    """

    num_rows: int
    has_replicas: bool
    regularizer: object
    owner_name: str


def mark(layers, num_processes):
    """Marks the variables of those that are `keras.layers.Embedding`s.

    Only variables that were made inside of `strategy.scope()`, which know
    whether a function was traced that reads them as they are stored.

    Args:
        layers: list of layers.
        num_processes: number of ranks that have the variables.
    """
    for layer in layers:
        variable = _looked_up(layer)
        if variable is not None:
            facts = Lookup(
                variable.shape[0],
                num_processes > 1,
                variable.regularizer,
                layer.name,
            )
            setattr(variable, _ATTRIBUTE, facts)


def owner_of(variable):
    """The `ShardedTable` or `Lookup` of a variable; None: neither."""
    if isinstance(variable, TableVariable):
        return variable.table
    return getattr(variable, _ATTRIBUTE, None)


def keepers_of(variables):
    """The keepers of the rows of some of a model's variables."""
    pieces = [
        piece
        for variable in variables
        if owner_of(variable) is not None
        for piece in pieces_of(variable)
    ]
    keepers = [keeper_of(piece.value) for piece in pieces]
    return [keeper for keeper in keepers if keeper is not None]


def _looked_up(layer):
    stock = keras.layers.Embedding
    if not isinstance(layer, stock) or type(layer).call is not stock.call:
        return None
    variable = layer.embeddings if layer.built else None
    # A tensor, if the layer has LoRA or was quantized.
    if not keras_variables.is_variable(variable):
        return None
    return variable if isinstance(variable.value, CurrentVariable) else None
