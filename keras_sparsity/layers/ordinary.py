"""Ordinary `keras.layers.Embedding`s whose rows are a table's.

The user's layer stays what it is: its class, its weight, its files. Its
variable becomes that of a `ShardedTable`, and its call gathers rows of it.
"""

import collections
import contextlib
import functools
import math

import keras
import tensorflow as tf

from keras_sparsity._tf import patches
from keras_sparsity.exchange.pull import shaped
from keras_sparsity.layers.sharded_embedding import (
    ShardedEmbedding,
    ids_of,
)
from keras_sparsity.tables import row_wise
from keras_sparsity.tables.sharded_table import ShardedTable
from keras_sparsity.tables.table_variable import TableVariable

# Set on a layer: its `TableLookup`.
_ATTRIBUTE = "_keras_sparsity_table_lookup"
# How many layers have got one: models are looked at anew when it changes.
_counts = {"bound": 0}


class TableLookup:
    """The call of an `Embedding` whose variable is a table's.

    Args:
        layer: the layer.
        table: the `ShardedTable`.

    Attributes:
        ahead: rows of the call that is under way, a list of one tensor, where
            they were gathered with other tables'.
    """

    def __init__(self, layer, table):
        self.table = table
        self.ahead = collections.deque()
        self._layer, self._stock = layer, layer.call

    def call(self, inputs):
        if self._layer.lora_enabled:  # since: it adds to each row
            return self._stock(inputs)
        if isinstance(inputs, tf.RaggedTensor):
            return tf.ragged.map_flat_values(self._rows, inputs)
        return self._rows(inputs)

    @property
    def _tables(self):
        return [self.table]

    def _requests(self, inputs):
        ids = self._row_ids(inputs)
        return [(self.table, ids, self._layer.compute_dtype)]

    def _rows(self, inputs):
        ids = self._row_ids(inputs)
        if self.ahead:
            (rows,) = self.ahead.popleft()
            return shaped(rows, ids)
        return self.table.gather(ids, dtype=self._layer.compute_dtype)

    def _row_ids(self, inputs):
        """Ids as stock Keras takes them: negative ones count from the end."""
        ids = ids_of(inputs)
        if ids.dtype not in (tf.int32, tf.int64):
            ids = tf.cast(ids, tf.int32)
        return tf.where(ids < 0, ids + self.table.num_rows, ids)


def lookup_of(layer):
    """The `TableLookup` of an ordinary `Embedding`; None if it has no table."""
    return getattr(layer, _ATTRIBUTE, None)


def num_bound():
    """How many layers have got a `TableLookup` so far."""
    return _counts["bound"]


def why_whole(layer):
    """Why an `Embedding` cannot be a table's; None if it can."""
    stock = keras.layers.Embedding
    kind = type(layer)
    if kind.call is not stock.call or kind.build is not stock.build:
        return f"its class {kind.__name__} has a `call` or `build` of its own"
    if layer.lora_rank is not None or getattr(layer, "lora_enabled", False):
        return "it uses LoRA"
    if getattr(layer, "quantization_mode", None) is not None:
        return "it is quantized"
    try:
        row_wise.check_acts_on_rows(
            layer.name,
            layer.embeddings_regularizer,
            layer.embeddings_constraint,
        )
    except ValueError:
        return "its regularizer or its constraint needs the whole of it"
    return None


def weight_of(layer):
    """The variable of a built `Embedding` of stock Keras; None of others."""
    is_stock = isinstance(layer, keras.layers.Embedding) and not isinstance(
        layer, ShardedEmbedding
    )
    return getattr(layer, "_embeddings", None) if is_stock else None


def num_bytes_of(layer):
    """Bytes of an `Embedding`'s weight."""
    size = tf.as_dtype(layer.variable_dtype).size
    return math.prod((layer.input_dim, layer.output_dim)) * size


def take_over(layer):
    """Makes the variable of a built layer a table's; returns that.

    In one piece, of which each rank has its own values: `table.shard` spreads
    rank 0's.
    """
    variable = weight_of(layer)
    if isinstance(variable, TableVariable):  # of two layers
        return _bound(layer, variable.table)
    return _bound(layer, ShardedTable.of_layer(layer, variable))


def made_as_tables(placements):
    """While entered, `Embedding`s that are built get tables, as is chosen.

    Args:
        placements: `Placements` of the strategy.
    """
    if placements.communicator.size == 1:
        return contextlib.nullcontext()

    def make(stock):
        def add_weight(layer, *args, **kwargs):
            if (
                kwargs.get("name") == "embeddings"
                and placements.owns_rows_of(num_bytes_of(layer))
                and why_whole(layer) is None
            ):
                return _new_table(layer).variable
            return stock(layer, *args, **kwargs)

        return add_weight

    return patches.EMBEDDING_WEIGHT.by(make)


def _new_table(layer):
    table = ShardedTable(
        layer.input_dim,
        layer.output_dim,
        initializer=layer.embeddings_initializer,
        regularizer=layer.embeddings_regularizer,
        constraint=layer.embeddings_constraint,
        dtype=layer.variable_dtype,
        name="embeddings",
        owner_name=layer.name,
    )
    table.is_of_stock_layer = True
    return _bound(layer, table)


def _bound(layer, table):
    """Has a layer look its rows up in a table; returns that."""
    lookup = TableLookup(layer, table)

    @functools.wraps(layer.call)
    def call(inputs):
        return lookup.call(inputs)

    # Not through Keras's attribute tracking: these are not state.
    object.__setattr__(layer, "call", call)
    object.__setattr__(layer, _ATTRIBUTE, lookup)
    _counts["bound"] += 1
    return table
