"""A model's layers as costs depend on them: times, bytes, gradients."""

import dataclasses
import math

import keras
import tensorflow as tf

from keras_sparsity.planning.transfer_cost import narrowest_index
from keras_sparsity.stages.softmaxes import is_softmax
from keras_sparsity.stages.timing import wire_size
from keras_sparsity.tables.table_variable import TableVariable, partitions_of


@dataclasses.dataclass(frozen=True)
class OwnedRows:
    """The rows that a call looks up in a sharded table.

    Attributes:
        table: the table's path.
        num_rows: the number of its rows.
        table_bytes: bytes of all of them; 0 if an earlier call looks them up.
        num_lookups: the number of rows that an example looks up.
        pulled_bytes: bytes of a row as it travels.
        pushed_bytes: those of its gradient; 0 of a frozen table.
        num_sampled: the number of rows that a batch looks up besides, those of
            a `SampledSoftmax`; 0 of other layers.
        num_partitions: of the table, by default the number of its owners.
    """

    table: str
    num_rows: int
    table_bytes: int
    num_lookups: int
    pulled_bytes: int
    pushed_bytes: int
    num_sampled: int = 0
    num_partitions: int | None = None

    def largest_bytes(self, num_owners):
        """Bytes of the table at the owner with the most of its partitions."""
        number = min(self.num_partitions or num_owners, self.num_rows)
        return self.table_bytes * math.ceil(number / num_owners) / number


@dataclasses.dataclass(frozen=True)
class GradientSize:
    """The gradients of one call's weights, as ranks sum them.

    Args:
        dense_bytes: bytes of gradients that travel whole.
        example_bytes: bytes of the rows, with their indices, that an example
            looks up in a table; they are gathered.
        table_bytes: bytes of that table, which no rank's rows exceed.
        num_lookups: the number of rows that an example looks up.
        owned: tuple of `OwnedRows`: rows of sharded tables, which are pulled
            from their owners, and whose gradients are pushed to these.

    Example:

    >>> GradientSize(example_bytes=10, table_bytes=64).row_bytes(8)
    64

    References:
        EuroSys 3.1 (AllReduce and AllGatherv).
    """

    dense_bytes: float = 0
    example_bytes: float = 0
    table_bytes: float = 0
    num_lookups: int = 0
    owned: tuple = ()

    @property
    def has_samples(self):
        """Whether the call is that of a `SampledSoftmax`."""
        return any(rows.num_sampled for rows in self.owned)

    @property
    def summed_bytes(self):
        """Bytes of the trained weights but those of sharded tables."""
        return self.dense_bytes + self.table_bytes

    @property
    def parameter_bytes(self):
        """Bytes of the trained weights."""
        return self.summed_bytes + sum(
            rows.table_bytes for rows in self.owned if rows.pushed_bytes
        )

    def owned_bytes(self, num_examples):
        """Bytes of the rows that a rank pulls and pushes for its examples."""
        return sum(
            min(
                num_examples * rows.num_lookups + rows.num_sampled,
                rows.num_rows,
            )
            * (
                narrowest_index(rows.num_rows)
                + rows.pulled_bytes
                + rows.pushed_bytes
            )
            for rows in self.owned
        )

    def row_bytes(self, num_examples):
        """Bytes of the rows that a rank's examples touch, at most."""
        return min(num_examples * self.example_bytes, self.table_bytes)


@dataclasses.dataclass(frozen=True)
class Profile:
    """A model's layers, as measured.

    Attributes:
        names: tuple of the calls' layers, in order.
        sizes: tuple of their `LayerSize`s.
        seconds: tuple of the times of their forward and backward passes, of
            `num_examples` examples.
        num_examples: see `seconds`.
        crossing_bytes: dict from a possible split's place to the bytes that
            cross it, of one example.
        gradients: tuple of the calls' `GradientSize`s.
        update_seconds: tuple of the times of their weights' updates, without
            those of sharded tables; empty if not measured.
        fixed_seconds: tuple of the parts of `seconds` that passes of any
            number of examples take; empty if there are none.
        sum_seconds: tuple of the times in which the gradients of two passes
            are added; empty if not measured.
        columns: tuple of the calls' `ColumnSize`s, None of a call that has no
            columns to divide; empty if no call has any.
        crowding: the times above, which are those of processes that compute at
            once, over those of a process that computes alone.
    """

    names: tuple
    sizes: tuple
    seconds: tuple
    num_examples: int
    crossing_bytes: dict
    gradients: tuple
    update_seconds: tuple = ()
    fixed_seconds: tuple = ()
    sum_seconds: tuple = ()
    columns: tuple = ()
    crowding: float = 1.0

    def crowded(self, factor):
        """This profile of processes that slow each other by a factor."""
        times = "seconds", "fixed_seconds", "update_seconds", "sum_seconds"
        return dataclasses.replace(
            self,
            crowding=factor * self.crowding,
            **{
                name: tuple(factor * each for each in getattr(self, name))
                for name in times
            },
        )

    def pass_seconds(self, num_examples, calls=slice(None)):
        """Times of the passes of a number of examples, of some calls."""
        share = num_examples / self.num_examples
        seconds = self.seconds[calls]
        fixed = self.fixed_seconds[calls] or [0.0] * len(seconds)
        return [
            of_any + (whole - of_any) * share
            for whole, of_any in zip(seconds, fixed, strict=True)
        ]


def gradient_sizes(cutter, wire_dtype=None):
    """The `GradientSize` of each call of a model: a list.

    The gradient of an ordinary `Embedding` without a regularizer is one of
    rows, unless other calls use its table. A layer that is called twice has its
    weights at the first call.

    Args:
        wire_dtype: name of a narrower dtype in which rows of sharded tables
            travel.

    Example:

    >>> from keras_sparsity.stages.cutting import Cutter
    >>> layers = [keras.Input((2,), dtype="int32"),
    ...           keras.layers.Embedding(100, 4), keras.layers.Dense(1)]
    >>> embedding, dense = gradient_sizes(Cutter(keras.Sequential(layers)))
    >>> embedding.example_bytes, embedding.table_bytes, dense.dense_bytes
    (36, 1600, 20)

    References:
        EuroSys 3.1 (sparse variables).
    """
    users = [
        id(variable)
        for call in cutter.calls
        for variable in getattr(call.operation, "trainable_variables", [])
    ]
    seen_tables, found = set(), []
    for call, new in zip(cutter.calls, cutter.new_variables(), strict=True):
        is_lookup = (
            type(call.operation) is keras.layers.Embedding
            and call.operation.embeddings_regularizer is None
            and all(users.count(id(v)) == 1 for v in new)
        )
        of_call = _of_rows(cutter, call, new) if is_lookup and new else None
        found.append(
            of_call
            or GradientSize(
                num_bytes(v for v in new if not isinstance(v, TableVariable)),
                owned=tuple(_owned_rows(cutter, call, wire_dtype, seen_tables)),
            )
        )
    return found


def places_of_heads(places, gradients):
    """Of cuts' places those that leave each sharded table where it can live.

    These are behind the last table of an embedding, which is in the head, and
    before the first `SampledSoftmax`, which is in the tail.

    Args:
        places: list.
        gradients: list of the calls' `GradientSize`s.

    Example:

    >>> owned = OwnedRows("table", 2, 8, 1, 4, 4)
    >>> of_table = GradientSize(owned=(owned,))
    >>> places_of_heads([0, 1], [GradientSize(), of_table])
    [1]
    """
    least, most = 0, len(gradients)
    for place, gradient in enumerate(gradients):
        if gradient.has_samples:
            most = min(most, place)
        elif gradient.owned:
            least = place
    return [place for place in places if least <= place < most]


def _of_rows(cutter, call, tables):
    if len(tables) != 1:  # such as with low-rank factors beside it
        return None
    (table,) = tables
    num_rows, *row = table.shape
    lookups = math.prod(cutter.example_shape(call.inputs[0]))
    row_bytes = math.prod(row) * tf.as_dtype(table.dtype).size
    return GradientSize(
        example_bytes=lookups * (row_bytes + narrowest_index(num_rows)),
        table_bytes=num_rows * row_bytes,
        num_lookups=lookups,
    )


def _owned_rows(cutter, call, wire_dtype, seen):
    """The `OwnedRows` of each of a call's requests.

    Args:
        cutter, wire_dtype: as for `gradient_sizes`.
        seen: set of the `id`s of the tables so far, which grows.
    """
    for table, num_lookups, dtype in _requests(cutter, call):
        variable, is_new = table.variable, id(table) not in seen
        seen.add(id(table))
        own = wire_size(tf.as_dtype(variable.dtype), wire_dtype)
        pulled = min(own, tf.as_dtype(dtype).size)
        yield OwnedRows(
            variable.path,
            table.num_rows,
            num_bytes([variable]) * is_new,
            num_lookups,
            table.dim * pulled,
            table.dim * own * variable.trainable,
            call.operation.num_sampled if is_softmax(call.operation) else 0,
            partitions_of(variable),
        )


def _requests(cutter, call):
    """`(table, number of an example's rows, dtype)` of a call's lookups."""
    layer = call.operation
    if hasattr(layer, "_requests"):
        example = keras.tree.map_structure(
            lambda tensor: tf.zeros(
                [1, *cutter.example_shape(tensor)], tensor.dtype
            ),
            call.arguments[0],
        )
        return [
            (table, int(tf.size(ids)), dtype)
            for table, ids, dtype in layer._requests(example)
        ]
    if is_softmax(layer):
        # Of the labels, one for each hidden state.
        number = math.prod(cutter.example_shape(call.inputs[0])[:-1])
        return [(each, number, layer.output_dtype) for each in layer.tables]
    # Of a layer of the user's, all ids may be those of each table.
    number = sum(math.prod(cutter.example_shape(each)) for each in call.inputs)
    return [
        (variable.table, number, variable.dtype)
        for variable in getattr(layer, "variables", [])
        if isinstance(variable, TableVariable)
    ]


def num_bytes(tensors):
    """Bytes of tensors or variables together.

    A dimension that depends on values counts as 1.
    """
    return sum(
        math.prod(1 if size is None else size for size in each.shape)
        * tf.as_dtype(each.dtype).size
        for each in tensors
    )
