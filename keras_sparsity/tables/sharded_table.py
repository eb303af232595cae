"""A table whose rows live in the processes that own them."""

import contextlib
import zlib

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import checks, keras_scopes
from keras_sparsity.collectives import order
from keras_sparsity.collectives.base import raise_if_different
from keras_sparsity.exchange import options
from keras_sparsity.exchange.layout import Layout, default_owners
from keras_sparsity.exchange.owned_rows import outside_message
from keras_sparsity.exchange.pull import PullNow, in_turn, shaped
from keras_sparsity.placement import choice
from keras_sparsity.sparsity import touches
from keras_sparsity.tables import control_flow, initial_values, row_wise
from keras_sparsity.tables.table_variable import (
    Partition,
    TableVariable,
    anchor,
    storage,
    to_numpy,
)


class ShardedTable:
    """A `(num_rows, dim)` table of parameters, gathered and updated by rows.

    With several processes each one stores only the partitions that it owns:
    `gather` pulls the rows of a batch from their owners, and its gradient
    pushes the rows' gradients back. In one process it is one ordinary
    variable. Make one in a layer of your own and assign `table.variable` to
    an attribute, as a weight:

    Args:
        num_rows: number of rows.
        dim: length of a row.
        num_partitions: number of partitions; by default the number of
            processes. The result of training does not depend on it.
        initializer: as for `keras.layers.Embedding`. The values do not depend
            on the number of processes or partitions.
        dtype: dtype of the rows; by default Keras's floatx.
        trainable: whether the rows are trained.
        name: name of the variable.
        owner_name: what errors call the table, for example the layer's name.
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
            predicted step time.
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
            the whole table: the layer's weight, and what gradients are taken
            with respect to.

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
        if num_partitions is not None:
            num_partitions = checks.num_partitions(
                "num_partitions",
                num_partitions,
                ", or None for the number of processes",
            )
        checks.boolean("trainable", trainable)
        checks.string("name", name)
        checks.optional_string("owner_name", owner_name)
        checks.function(
            "to_stock", to_stock, "None or a function of the table's array"
        )
        for kind, value in (
            ("regularizer", regularizer),
            ("constraint", constraint),
        ):
            checks.function(
                kind, value, f"None or a callable, such as Keras's {kind}s"
            )
        checks.optional_string("partition_group", partition_group)
        choice.check_requested(
            "architecture", architecture, ", or None for the strategy's"
        )
        _check_is_float(dtype)
        self.requested_architecture = architecture
        self.requested_partitions = num_partitions
        self.partition_group = partition_group
        self.initializer = initial_values.standardize(initializer)
        self.owner_name = owner_name or name
        # None until the table is distributed, and in one process.
        self.collectives = None
        self.placement = None
        self.partitions = []
        # Collectives of one table are told apart by this role.
        self.role = f"table/{self.owner_name}"
        # And those in which it travels with others by this one.
        self.messages = self.role
        # Of a row, as its owner last sent it; None before.
        self.pulled_bytes = None
        # Made by `exchange_of`, of this table first, until it moves.
        self.exchanges = {}
        # Fingerprints of what `assign_like` was given since ranks were last
        # seen to agree on it, by the path of what they were given for.
        self.given = {}
        self.regularizer = regularizer
        self.constraint = constraint
        self._to_stock = to_stock
        # The variable may create its storage at once, or later in `build`.
        self.variable = None
        self.variable = TableVariable(
            self, dtype=dtype, trainable=trainable, name=name
        )
        self.variable.constraint = constraint
        self.variable.regularizer = regularizer

    @property
    def architecture(self):
        """Name of the placement; None until the table is distributed."""
        return self.placement and self.placement.name

    @property
    def layout(self):
        """`Layout` of the rows over owners; None if each rank has them all."""
        return self.placement and self.placement.layout

    @property
    def is_sharded(self):
        """Whether the rows are spread over partitions."""
        return self.layout is not None

    @property
    def pieces(self):
        """The variables that hold this rank's rows."""
        return self.partitions if self.is_sharded else [self.variable]

    @property
    def shares_messages(self):
        """Whether its rows were last pulled with those of other tables."""
        return self.messages != self.role

    # Storage.

    def create(self, variable):
        """Creates the storage; returns the value of the table's variable."""
        self.variable = variable
        placements = choice.entered()
        # Out of any function that is being traced: values are real.
        with tf.init_scope():
            placement = None
            if placements.communicator.size > 1:
                self._agree_on_seed(placements.communicator)
                placement = self._distributed(placements)
            return self.hold(placement, self._draw(self._own_rows(placement)))

    def shard(self, placements):
        """Distributes a table that was built by one process.

        Every process keeps its own rows of rank 0's table, if the table is to
        be spread. A distributed table stays as it is.

        Args:
            placements: `Placements` of the strategy.
        """
        communicator = placements.communicator
        is_done = self.collectives is not None or not self.variable.is_built
        if is_done or communicator.size == 1:
            return
        placement = self._distributed(placements)
        if placement.layout is None:
            # Rank 0's values, as of all whole variables, before the first step.
            self.placement = placement
            return
        (whole,) = communicator.broadcast(
            [tf.constant(self.variable.numpy())], name=f"{self.role}/shard"
        )
        whole = whole.numpy()
        rows = [whole[r] for r in self._own_rows(placement)]
        self.variable.use(self.hold(placement, rows))

    def layout_over_owners(self, num_partitions=None):
        """The `Layout` of the rows where each rank is to own some.

        Args:
            num_partitions: by default, as many as the table was made with.
        """
        count = num_partitions or self.requested_partitions
        return Layout(
            self.num_rows, count or self.collectives.size, self._owners
        )

    def hold(self, placement, rows):
        """Stores these rows from now on.

        Args:
            placement: the table's `Placement` from now on; None in one
                process.
            rows: list of arrays or tensors: the rows of each partition that
                this rank owns, or all of the table's rows.

        Returns:
            The value of the table's variable.
        """
        layout = placement and placement.layout
        if layout is not None:
            self.check_can_be_spread()
        touches.discard(self.variable)
        self.given.clear()
        self.exchanges.clear()
        self.placement = placement
        self.variable.regularizer = self.regularizer
        if layout is None:
            self.partitions = []
            return storage(rows[0], self.variable)
        # With fewer partitions than processes some have none: one without
        # rows, so that all have the same kinds of variables.
        rows = rows or [np.zeros((0, self.dim), np.float32)]
        self.partitions = [
            Partition(self.variable, values, index)
            for index, values in enumerate(rows)
        ]
        return anchor(self.variable, self._refuse_stock_optimizer)

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

    def _distributed(self, placements):
        """Takes its communicator, once all ranks are seen to agree.

        Returns:
            Its `Placement`.
        """
        communicator = placements.communicator
        definition = {
            "table": self.owner_name,
            "num_rows": self.num_rows,
            "dim": self.dim,
            "num_partitions": self.requested_partitions,
            "architecture": placements.name_of_table(self),
            "dtype": self.variable.dtype,
        }
        facts = communicator.gather_objects(
            [communicator.local_rank, communicator.cross_rank, definition],
            name="table/topology",
        )
        raise_if_different(
            [definition for _, _, definition in facts],
            "The model's tables",
            "Build the same model on every rank.",
        )
        self.collectives = communicator
        self._owners = default_owners([tuple(place) for *place, _ in facts])
        return placements.of_table(self)

    def _own_rows(self, placement):
        """Ids of the rows of each piece that this rank has by a placement."""
        layout = placement and placement.layout
        if layout is None:
            return [np.arange(self.num_rows)]
        owned = layout.owned_partitions(self.collectives.rank)
        return [layout.rows_of(partition) for partition in owned]

    def _refuse_stock_optimizer(self, *args, **kwargs):
        raise ValueError(
            f"The sharded table '{self.owner_name}' was given to an optimizer "
            "that cannot update it. Wrap it: `ks.HybridOptimizer(optimizer)`; "
            "`with strategy.scope(): model.compile(...)` does so itself."
        )

    def _draw(self, rows):
        return initial_values.draw(
            self.initializer,
            (self.num_rows, self.dim),
            self.variable.dtype,
            rows,
        )

    def _agree_on_seed(self, communicator):
        seed = getattr(self.initializer, "seed", None)
        if isinstance(seed, int):
            seeds = communicator.gather_objects(seed, name="table/seed")
            if seeds[0] != seed:
                config = self.initializer.get_config()
                config["seed"] = seeds[0]
                self.initializer = type(self.initializer).from_config(config)

    # Rows.

    def gather(self, ids, columns=None, dtype=None):
        """Rows of the table.

        What makes rows smaller is done by their owners, before they send them:
        `table.gather(ids, columns=slice(0, 8), dtype="bfloat16")` gives
        what `tf.cast(table.gather(ids)[..., :8], "bfloat16")` gives, and
        pulls fewer bytes.

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
        start, stop = self._start_and_stop(columns)
        _check_is_float(dtype)
        dtype = tf.as_dtype(dtype or self.variable.dtype)
        ids = checks.tensor("ids", ids, "a tensor or array of integers")
        if not ids.dtype.is_integer:
            raise ValueError(
                f"{self.owner_name}: ids must be integers. "
                f"Received: ids of dtype {ids.dtype.name}."
            )
        if not self.variable.is_built or keras_scopes.in_symbolic_scope():
            shape = tf.concat([tf.shape(ids), [stop - start]], axis=0)
            return shaped(tf.zeros(shape, dtype), ids)
        is_whole = stop - start == self.dim
        if not self.is_sharded:
            rows = self._gather_here(ids)
            return tf.cast(rows if is_whole else rows[..., start:stop], dtype)
        if control_flow.is_entered():
            rows = self._gather_of(control_flow.read_before(self), ids)
            return tf.cast(rows[..., start:stop], dtype)
        pull = PullNow(
            [([self], tf.reshape(ids, [-1]))],
            options.entered(),
            None if is_whole else (start, stop),
            dtype,
        )
        ((rows,),) = in_turn([pull])
        return tf.cast(shaped(rows, ids), dtype)

    def _start_and_stop(self, columns):
        """Those of a slice of a row."""
        if columns is None:
            return 0, self.dim
        start = stop = 0
        with contextlib.suppress(TypeError):  # of ends that are no integers
            if isinstance(columns, slice) and columns.step in (None, 1):
                start, stop, _ = columns.indices(self.dim)
        checks.check(
            start < stop,
            "columns",
            columns,
            f"a slice of some of the {self.dim} columns, of a step of 1",
        )
        return start, stop

    def check_under_strategy(self):
        """Raises where training would go on without any aggregation."""
        if self.is_sharded and not under_strategy():
            raise ValueError(
                f"'{self.owner_name}' is spread over "
                f"{self.collectives.size} processes, but is trained outside "
                "of a strategy: gradients would not be aggregated. Write "
                "`with strategy.scope(): model.compile(...)`, or, in a custom "
                "training loop, `strategy.run(train_step, args=(batch,))`, "
                "with a `ks.HybridStrategy()`."
            )

    def _gather_here(self, ids):
        # On the variable itself, not on its value: reading the value after a
        # sparse write copies the whole table.
        return self._gather_of(self.variable.value, ids)

    def _gather_of(self, whole, ids):
        if ids.dtype not in (tf.int32, tf.int64):
            ids = tf.cast(ids, tf.int64)
        inside = self.assert_inside(ids)
        with tf.control_dependencies(inside):
            return tf.gather(whole, ids)

    def assert_inside(self, ids):
        """Operations that fail if an id of int32 or int64 is outside."""
        # Without their signs negative ids are the largest ones, so that one
        # extreme is enough; that of no ids at all is 0. In a small model each
        # operation counts: see benchmarks/single_process.py.
        unsigned = tf.uint32 if ids.dtype == tf.int32 else tf.uint64
        largest = tf.reduce_max(tf.bitcast(ids, unsigned))
        limit = tf.constant(min(self.num_rows, ids.dtype.max + 1), unsigned)
        check = tf.raw_ops.Assert(
            condition=largest < limit,
            data=outside_message(
                self.owner_name, tf.bitcast(largest, ids.dtype), self.num_rows
            ),
            name="ids_are_inside",
        )
        return [] if check is None else [check]

    def check_inside(self, ids):
        """Operations that fail, on every rank, if any rank's id is outside.

        For ids that are not gathered; `gather` checks those it is given.
        """
        if not self.is_sharded:
            return self.assert_inside(ids)
        ids = tf.concat([tf.cast(tf.reshape(ids, [-1]), tf.int64), [0]], 0)
        (extremes,) = self.collectives.all_reduce(
            [tf.stack([tf.reduce_max(ids), -tf.reduce_min(ids)])],
            op="max",
            name=f"{self.role}/check_inside",
        )
        checked = self.assert_inside(tf.stack([extremes[0], -extremes[1]]))
        order.hold_sums(checked)
        return checked

    # The whole table.

    def read(self):
        """The whole table on every rank: an array `(num_rows, dim)`.

        Every rank must call it.
        """
        if not self.is_sharded:
            return self.variable.value.numpy()
        return self.read_like(self.partitions)

    def stored_rows(self):
        """This rank's rows of a spread table, partition by partition.

        Without a gradient to the table.
        """
        rows = [tf.stop_gradient(p.value) for p in self.partitions]
        if not self.partitions[0].num_rows:  # a rank without a partition
            rows = [rows[0][:0]]
        return tf.concat(rows, axis=0)

    def whole(self):
        """The whole of the table as a tensor, also inside of a step.

        Every rank must call it. Without a gradient to the table if that is
        spread: what trains it gathers rows.
        """
        if not self.is_sharded:
            return tf.convert_to_tensor(self.variable.value)
        gathered = self.collectives.all_gather(
            self.stored_rows(), name=f"{self.role}/whole"
        )
        order = self.layout.stored_position(tf.range(self.num_rows))
        return tf.ensure_shape(
            tf.gather(gathered, order), [self.num_rows, self.dim]
        )

    def read_like(self, pieces):
        """A whole array from pieces that are laid out like the table.

        Args:
            pieces: one variable for each of this rank's partitions, for
                example an optimizer's slots.

        Returns:
            Array `(num_rows, ...)`, on every rank.
        """
        layout = self.layout
        _announce(pieces)
        mine = np.concatenate(
            [
                to_numpy(piece)[: partition.num_rows]
                for piece, partition in zip(
                    pieces, self.partitions, strict=True
                )
            ]
        )
        gathered = self.collectives.all_gather(
            tf.constant(mine), name=f"{self.role}/read"
        ).numpy()
        whole = np.empty((self.num_rows, *gathered.shape[1:]), gathered.dtype)
        start = 0
        for rank in range(layout.num_owners):
            for partition in layout.owned_partitions(rank):
                stop = start + layout.num_rows_of(partition)
                whole[layout.rows_of(partition)] = gathered[start:stop]
                start = stop
        return whole

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
        try:
            whole = to_numpy(whole)
        except Exception as error:  # whatever an object's own method raises
            raise ValueError(
                f"`whole` must be an array of the table '{self.owner_name}'. "
                f"Received: {checks.spell(whole)}, of which NumPy makes none: "
                f"{checks.shortened(error)}"
            ) from error
        if whole.shape != (self.num_rows, self.dim):
            raise ValueError(
                "The shape of `whole` does not match the table "
                f"'{self.owner_name}'. Received: shape {whole.shape}. "
                f"Expected: {(self.num_rows, self.dim)}."
            )
        if whole.dtype.kind not in "fiubV":  # V: bfloat16
            raise ValueError(
                f"`whole`, the table '{self.owner_name}', must be real "
                f"numbers. Received: an array of dtype {whole.dtype}."
            )
        if not self.is_sharded:
            self.variable.assign_whole(whole)
            return
        self.assign_like(self.partitions, whole)

    def assign_like(self, pieces, whole):
        """Gives pieces that are laid out like the table their values."""
        layout = self.layout
        owned = layout.owned_partitions(self.collectives.rank)
        whole = np.ascontiguousarray(whole)
        fingerprint = zlib.crc32(whole.reshape(-1).view(np.uint8))
        self.given[pieces[0].path] = fingerprint
        # A rank without a partition has one piece, without rows.
        for piece, partition in zip(pieces, owned, strict=False):
            rows = layout.rows_of(partition)
            if len(rows):
                piece.assign(whole[rows])


_announcers = []


@contextlib.contextmanager
def announcing(announce):
    """While entered, `announce(pieces)` comes before each reading.

    For the rank that decides alone what is read next: the others wait to be
    told, so that all take part in the same reading.
    """
    _announcers.append(announce)
    try:
        yield
    finally:
        _announcers.remove(announce)


def _announce(pieces):
    for announce in _announcers:
        announce(pieces)


def under_strategy():
    """Whether a `HybridStrategy` is entered."""
    return hasattr(tf.distribute.get_strategy(), "collectives")


def _check_is_float(dtype):
    kinds = (str, type, np.dtype, tf.DType)
    try:
        is_float = dtype is None or (
            isinstance(dtype, kinds) and tf.as_dtype(dtype).is_floating
        )
    except TypeError:
        is_float = False
    checks.check(
        is_float,
        "dtype",
        dtype,
        "None or a floating-point dtype, such as 'float32'",
    )
