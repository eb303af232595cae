"""A table whose rows live in the processes that own them."""

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import checks, deferred_weights, keras_scopes
from keras_sparsity._tf.current_variable import keeper_of, make_current
from keras_sparsity.exchange import options
from keras_sparsity.exchange.layout import Layout
from keras_sparsity.exchange.pull import PullNow, in_turn, shaped
from keras_sparsity.sparsity import touches
from keras_sparsity.tables import (
    arguments,
    control_flow,
    distributing,
    foreseen,
    initial_values,
    row_wise,
)
from keras_sparsity.tables import whole as whole_tables
from keras_sparsity.tables.inside import gather_whole
from keras_sparsity.tables.readers import Readers
from keras_sparsity.tables.table_variable import (
    Partition,
    TableVariable,
    anchor,
    storage,
    take_over,
    to_numpy,
)


class ShardedTable:
    """A `(num_rows, dim)` table of parameters, gathered and updated by rows.

    With several processes each one stores only the partitions that it owns:
    `gather` pulls the rows of a batch from their owners, and its gradient
    pushes the rows' gradients back. In one process it is one ordinary
    variable. A layer of your own makes one and assigns `table.variable` to an
    attribute, as a weight.

    Args:
        num_rows: number of rows.
        dim: length of a row.
        num_partitions: number of partitions; by default the number of
            processes, or of dedicated servers. The result of training depends
            on it by rounding only.
        initializer: as for `keras.layers.Embedding`. The values do not depend
            on the number of processes or partitions.
        dtype: dtype of the rows; by default Keras's floatx.
        trainable: whether the rows are trained.
        name: name of the variable.
        owner_name: the table's name in errors, for example the layer's.
        regularizer, constraint: as for `keras.layers.Embedding`, those that
            act on each row by itself.
        architecture: placement of the table on several processes; by default
            the strategy's. The result of training depends on it by rounding
            only.
            `"ps"` (parameter server): each process owns some partitions.
            `"allgather"`: each process has the whole table; the gradients of
            touched rows are gathered from all.
            `"allreduce"`: each process has the whole table; its gradient is
            made dense and summed with those of dense variables.
            `"auto"`: begins as `"ps"`; after the first steps of `fit`, and
            when alpha drifts, it switches to the architecture with the lowest
            predicted step time, see `ks.HybridStrategy`.
        to_stock: function from the whole array to the weight of the stock
            layer in `ks.export`; by default the same array.
        partition_group: tables of one group get the same number of partitions
            from `ks.callbacks.PartitionSearch`; those without a name are one
            group.

    Raises:
        ValueError: if an argument has another type or value, or ranks define
            different tables.

    Attributes:
        variable: a `keras.Variable` of shape `(num_rows, dim)` that stands for
            the whole table: the layer's weight, with respect to which
            gradients are taken.

    Example:

    >>> import numpy as np
    >>> table = ShardedTable(10, 4, initializer="zeros")
    >>> table.gather(np.array([[1, 2, 2]])).shape
    TensorShape([1, 3, 4])

    References:
        EuroSys 3.2 and 4.3.
    """

    def __init__(
        self,
        num_rows,
        dim,
        num_partitions=None,
        initializer="uniform",
        dtype=None,
        trainable=True,
        name="embeddings",
        owner_name=None,
        regularizer=None,
        constraint=None,
        to_stock=None,
        partition_group=None,
        architecture=None,
    ):
        self.num_rows = checks.dimension("num_rows", num_rows)
        self.dim = checks.dimension("dim", dim)
        self.requested_partitions = arguments.check_spreading(
            num_partitions, partition_group, architecture
        )
        checks.boolean("trainable", trainable)
        checks.string("name", name)
        checks.optional_string("owner_name", owner_name)
        arguments.check_functions(
            to_stock, regularizer=regularizer, constraint=constraint
        )
        arguments.check_is_float(dtype)
        self.requested_architecture = architecture
        self.partition_group, self._to_stock = partition_group, to_stock
        self.regularizer, self.constraint = regularizer, constraint
        self._begin(initial_values.standardize(initializer), owner_name or name)
        # The variable may create its storage at once, or later in `build`.
        self.variable = None
        self.variable = deferred_weights.made(
            lambda: TableVariable(
                self, dtype=dtype, trainable=trainable, name=name
            ),
            self.initializer,
            sends_messages=True,
        )
        self.variable.constraint = constraint
        self.variable.regularizer = regularizer

    @classmethod
    def of_layer(cls, layer, variable):
        """The table of an ordinary `Embedding`, whose variable becomes its own.

        In one piece, as a table that one process has built.

        Args:
            layer: a built `keras.layers.Embedding`.
            variable: its weight.
        """
        table = cls.__new__(cls)
        table.num_rows, table.dim = variable.shape
        table.requested_architecture = table.requested_partitions = None
        table.partition_group = table._to_stock = None
        table.regularizer = variable.regularizer
        table.constraint = variable.constraint
        table._begin(layer.embeddings_initializer, layer.name)
        table.is_of_stock_layer = True
        table.variable = take_over(variable, table)
        return table

    def _begin(self, initializer, owner_name):
        """Sets what a table of any origin begins with."""
        self.initializer, self.owner_name = initializer, owner_name
        # Whether it is of an ordinary `keras.layers.Embedding`.
        self.is_of_stock_layer = self.is_whole_lookup_told = False
        # None until the table is distributed, and in one process.
        self.collectives = self.owners = None
        self.place(None)
        self.partitions, self.readers = [], Readers()
        # Collectives of one table are told apart by this role, and those in
        # which it travels with others by `messages`.
        self.role = self.messages = f"table/{self.owner_name}"
        # Of a row, as its owner last sent it; None before.
        self.pulled_bytes = None
        # Made by `exchange_of`, of this table first, until it moves.
        self.exchanges = {}
        # Fingerprints of the values that `assign_like` got since ranks were
        # last seen to agree on them, by the path of their variable.
        self.given = {}

    @property
    def architecture(self):
        """Name of the placement; None until the table is distributed."""
        return self.placement and self.placement.name

    @property
    def sends_messages(self):
        """Whether `gather` sends messages, here and now."""
        return (
            self.is_sharded
            and not keras_scopes.in_symbolic_scope()
            and not control_flow.surroundings()
        )

    @property
    def has_replicas(self):
        """Whether other processes hold the same rows."""
        return self.collectives is not None and not self.is_sharded

    @property
    def pieces(self):
        """The variables that hold this rank's rows."""
        return self.partitions if self.is_sharded else [self.variable]

    @property
    def shares_messages(self):
        """Whether its rows were last pulled with those of other tables."""
        return self.messages != self.role

    # Storage; by these two it gets its first.

    create, shard = distributing.create, distributing.shard

    def layout_over_owners(self, num_partitions=None):
        """The `Layout` of the rows where each rank is to own some.

        Args:
            num_partitions: by default, as many as the table was made with.
        """
        count = num_partitions or self.requested_partitions
        return Layout(self.num_rows, count or len(self.owners), self.owners)

    def place(self, placement):
        """Takes a `Placement`; None in one process."""
        self.placement = placement
        # `Layout` of the rows over owners; None if each rank has them all.
        self.layout = placement and placement.layout
        # Whether the rows are spread over partitions.
        self.is_sharded = self.layout is not None

    def hold(self, placement, rows):
        """Stores these rows from now on.

        Args:
            placement: the table's `Placement` from now on; None in one
                process.
            rows: list of arrays, tensors or new `tf.Variable`s: the rows of
                each partition that this rank owns, or all of the table's rows.

        Returns:
            The value of the table's variable.
        """
        layout = placement and placement.layout
        if layout is not None:
            self.check_can_be_spread()
        touches.discard(self.variable)
        self.given.clear()
        self.exchanges.clear()
        self.place(placement)
        self.variable.regularizer = self.regularizer
        if layout is None:
            self.partitions = []
            return make_current(storage(rows[0], self.variable))
        # With fewer partitions than processes some have none: one without
        # rows, so that all have the same kinds of variables.
        rows = rows or [np.zeros((0, self.dim), np.float32)]
        self.partitions = [
            Partition(self.variable, values, index)
            for index, values in enumerate(rows)
        ]
        return anchor(self.variable)

    def check_can_be_spread(self):
        """Raises if a regularizer or a constraint needs the whole table."""
        row_wise.check_acts_on_rows(
            self.owner_name, self.regularizer, self.constraint
        )

    def use_regularizer(self, regularizer):
        """Takes another regularizer; returns that of its variable."""
        if self.is_sharded:
            row_wise.check_acts_on_rows(self.owner_name, regularizer, None)
        self.regularizer = regularizer
        if regularizer is None or not self.is_sharded:
            return regularizer
        return row_wise.SpreadRegularizer(self, regularizer)

    def use_constraint(self, constraint):
        """Takes another constraint."""
        if self.is_sharded:
            row_wise.check_acts_on_rows(self.owner_name, None, constraint)
        self.constraint = constraint
        for partition in self.partitions:
            partition.constraint = constraint

    # Rows.

    @tf.autograph.experimental.do_not_convert
    def gather(self, ids, columns=None, dtype=None):
        """Rows of the table.

        Owners slice and cast rows before they send them:
        `table.gather(ids, columns=slice(0, 8), dtype="bfloat16")` equals
        `tf.cast(table.gather(ids)[..., :8], "bfloat16")` and pulls fewer bytes.

        Args:
            ids: integer tensor or array of any shape `(...)`, each in
                `[0, num_rows)`.
            columns: a `slice` of each row; by default all of it.
            dtype: floating-point dtype that the rows are cast to; by default
                the table's. Gradients travel, and are summed, in the table's.

        Returns:
            Tensor `(..., dim)`, of the columns alone if these are given,
            differentiable with respect to `variable`.

        Raises:
            tf.errors.InvalidArgumentError: on every rank, if any rank has an
                id outside the table.

        References:
            arXiv 5.3.2 (operation placement).
        """
        if columns is not None:
            columns = arguments.part_of_row(columns, self.dim)
        arguments.check_is_float(dtype)
        dtype = tf.as_dtype(dtype or self.variable.dtype)
        ids = arguments.ids(ids, self.owner_name)
        self.readers.note()
        if self.is_sharded and ids.shape == [self.num_rows]:
            whole_tables.tell_of_lookup(self, ids)
        if foreseen.sources:
            rows = foreseen.rows(self, ids, columns, dtype)
            if rows is not None:
                return rows
        if keras_scopes.in_symbolic_scope():
            shape = tf.concat([tf.shape(ids), [self.dim]], axis=0)
            rows = shaped(tf.zeros(shape, dtype), ids)
            return rows if columns is None else rows[..., slice(*columns)]
        deferred_weights.initialize([self.variable])
        if not self.is_sharded:
            # On the variable itself, not on its value: reading the value
            # after a sparse write copies the whole table.
            rows = gather_whole(self, self.variable.value, ids)
        elif control_flow.surroundings():
            rows = gather_whole(self, control_flow.read_before(self), ids)
        else:
            request = [self], tf.reshape(ids, [-1])
            pull = PullNow([request], options.entered(), columns, dtype)
            ((rows,),) = in_turn([pull])
            return tf.cast(shaped(rows, ids), dtype)
        return tf.cast(
            rows if columns is None else rows[..., slice(*columns)], dtype
        )

    # The whole table.

    def settle(self):
        """Brings rows up to date that an optimizer has left behind.

        Local: no rank waits for another.
        """
        for piece in self.pieces:
            keeper = keeper_of(piece.value)
            if keeper is not None:
                keeper.settle()

    def read(self):
        """The whole table on every rank: an array `(num_rows, dim)`.

        Every rank must call it.
        """
        deferred_weights.initialize([self.variable])
        if not self.is_sharded:
            return self.variable.value.numpy()
        return whole_tables.read_like(self, self.partitions)

    def to_stock(self, whole):
        """A whole array as the stock layer that takes its place has it."""
        if self._to_stock is None:
            return whole
        return to_numpy(self._to_stock(whole))

    def copy(self):
        """Another table with the same options and the same rows."""
        variable = self.variable
        copied = ShardedTable(
            self.num_rows,
            self.dim,
            num_partitions=self.requested_partitions,
            initializer=self.initializer,
            dtype=variable.dtype,
            trainable=variable.trainable,
            name=variable.name,
            owner_name=self.owner_name,
            regularizer=self.regularizer,
            constraint=self.constraint,
            to_stock=self._to_stock,
            partition_group=self.partition_group,
            architecture=self.requested_architecture,
        )
        if variable.is_built:
            copied.assign(self.read())
        return copied

    def assign(self, whole):
        """Gives the table new values; every rank passes the whole table."""
        deferred_weights.initialize([self.variable])
        array = arguments.whole(self, whole)
        if self.is_sharded:
            whole_tables.assign_like(self, self.partitions, array)
        else:
            self.variable.assign_whole(array)
