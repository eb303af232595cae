"""Rows between those that need them and those that own them."""

import hashlib

import tensorflow as tf

from keras_sparsity.collectives import order
from keras_sparsity.collectives.engine import num_up_to
from keras_sparsity.data import empty_parts
from keras_sparsity.exchange.addresses import Addresses, is_marked, marked
from keras_sparsity.exchange.ahead import Exchange
from keras_sparsity.exchange.lengths import Lengths
from keras_sparsity.exchange.routes import Direct, ThroughMachines
from keras_sparsity.placement import architectures
from keras_sparsity.sparsity import touches


def in_turn(pulls):
    """The rows of several `Pull`s of a step, which come in this order.

    All ids are sent before any rows: behind them, those of a later pull would
    wait for the rows of the earlier ones, and their owners, who could gather
    meanwhile, would do so when they compute with these. Rows of the next step
    come behind all of them.

    An id outside of its table ends the step, on all ranks. It is found where
    none of these messages, and no sum of all ranks, is under way: one that is
    given up by a rank before it has begun there, the others wait for, or find
    in the next step.

    Returns:
        List of what each pull's `rows` gives.
    """
    behind = [tensor for pull in pulls for tensor in pull.ask()]
    behind += [tensor for pull in pulls for tensor in pull.resume(behind)]
    for pull in pulls:
        behind = pull.check(behind)
    order.hold_sums(behind)
    results = []
    for pull in pulls:
        results.append(pull.rows(behind))
        behind = pull.sent or behind
    arrived = [pull.arrived for pull in pulls]
    for pull in pulls:
        pull.send_ahead(behind=arrived)
    return results


def shaped(rows, ids):
    """Rows `(n, dim)` as `(..., dim)`, for n ids of shape `(...)`."""
    dim = rows.shape[-1]
    rows = tf.reshape(rows, tf.concat([tf.shape(ids), [dim]], axis=0))
    rows.set_shape([*ids.shape, dim])
    return rows


def way_of(communicator, strategy=None):
    """Which of `ways` the rows of spread tables go under a strategy."""
    if architectures.aggregates_locally(strategy) and (
        ThroughMachines.is_possible(communicator)
    ):
        return ThroughMachines
    return Direct


class Pull:
    """Rows of spread tables, from their owners, in one exchange.

    Unique addresses go to their owners and the rows come back; the gradient's
    rows, summed over this rank's ids, travel the addresses' route once more.
    However many tables there are, these are three messages.

    Args:
        requests: list of `(tables, ids)`, ids an integer tensor `(n,)`: each
            of the `ShardedTable`s, which have one `Layout`, is asked for the
            same rows. All tables have one dtype.
        ahead: `Ahead` of these tables, where the next step's rows are asked
            for in this one; else None. With it, all of a request together
            have as many columns as those of every other.
        following: the next step's requests, of the same tables in the same
            order, if there is an `ahead`.
        columns: `(start, stop)`, of one table: what is needed of its rows, and
            what their owners send of them; None: all.
        cast_to: what all of the rows are cast to where they arrive, if that is
            known: rows that are cast to what is narrower, their owners cast.

    Attributes:
        sent: list of tensors, once `rows` is called: what this rank sends of
            its rows, if it has not before.
        arrived: then, what has come: each row that this rank asks for, once.

    References:
        EuroSys 3.1 (pull and push), 4.3 (one gradient for each row); arXiv
        5.3.2 (operations that make data smaller, where the data is).
    """

    def __init__(
        self, requests, ahead=None, following=None, columns=None, cast_to=None
    ):
        groups = list(dict.fromkeys(tuple(tables) for tables, _ in requests))
        tables = [table for group in groups for table in group]
        communicator = tables[0].collectives
        addresses = Addresses([group[0] for group in groups])
        dtype = tables[0].variable.dtype
        pull_wire = architectures.wire(dtype, cast_to=cast_to)
        role = _role_of(tables)
        lengths = [sum(table.dim for table in group) for group in groups]
        if columns is not None:
            start, stop = columns
            lengths = [stop - start]
        for table in tables:
            table.messages = role
            num_columns = table.dim if columns is None else stop - start
            table.pulled_bytes = num_columns * pull_wire.dtype.size
        self._groups, self._tables = groups, tables
        self._addresses, self._columns = addresses, columns
        # Without examples this rank needs no rows, and adds to none.
        self._counts = [tf.size(ids) for _, ids in requests]
        requests = [(of, empty_parts.cut(ids)) for of, ids in requests]
        self._request = _Request(requests, groups, addresses)
        self._way = way_of(communicator)(
            communicator,
            role,
            pull_wire,
            architectures.wire(dtype),
            Lengths(lengths, addresses) if len(set(lengths)) > 1 else None,
        )
        # In memory all rows are as wide as the widest.
        self._width = max(lengths)
        self._lengths = [lengths[groups.index(tuple(of))] for of, _ in requests]
        self._ahead = ahead
        if ahead is not None:
            self._exchange = Exchange(
                communicator, role, pull_wire, addresses, self._owned_rows
            )
            self._following = _Request(following, groups, addresses)
        self.sent, self.arrived = [], None

    def ask(self):
        """Tells the owners which rows are wanted.

        Returns:
            List of tensors that are there when this rank has been asked, too.
        """
        with tf.name_scope("pull"):  # as a profiler's trace is to call it
            if self._ahead is None:
                self._ask()
                return [self._way.received]
            self._following.merge()
            self._announced = self._ahead.announce(
                self._exchange, self._following
            )
            return []  # it was, in the step before

    def resume(self, behind):
        """Has those rows sent that were asked for in the step before.

        Args:
            behind: tensors that are waited for.

        Returns:
            List of tensors that are there when no message is under way.
        """
        if self._ahead is None:
            return []
        with tf.name_scope("pull"), tf.control_dependencies(behind):
            self._late = self._ahead.pull(self._exchange, self._request)
        return [self._late.rows, *self._announced.last_messages]

    def check(self, behind):
        """Ends the step if an id is outside.

        Args:
            behind: tensors that are waited for.

        Returns:
            List of tensors that are there when none is.
        """
        with tf.name_scope("pull"), tf.control_dependencies(behind):
            if self._ahead is None:
                self._check()
                return [self._way.received]
            self.arrived = self._late.settle(self._way, self._pull_anew)
            return [self.arrived]

    def rows(self, behind):
        """Has them sent.

        Args:
            behind: tensors that are waited for.

        Returns:
            List of tensors `(n, columns)`, one for each request: the rows of
            its tables side by side, of the tables' dtype.
        """
        with tf.name_scope("pull"):
            if self._ahead is None:
                with tf.control_dependencies(behind):
                    self.sent = [self._owned_rows(self._way.received)]
                    self.arrived = self._way.pull(*self.sent)
            return self._expanded(self.arrived)

    def send_ahead(self, behind):
        """Sends rows of the next step; nothing if there is no `ahead`.

        Args:
            behind: tensors that are waited for.
        """
        if self._ahead is not None:
            with tf.name_scope("pull"):
                self._ahead.send(self._exchange, self._announced, behind)

    def _pull_anew(self):
        self._ask()
        self._check()
        return self._way.pull(self._owned_rows(self._way.received))

    def _ask(self):
        self._request.merge()
        self._way.ask(self._request, self._addresses)

    def _check(self):
        self._way.received = _checked(
            self._way.received,
            [group[0] for group in self._groups],
            self._addresses,
        )

    def _owned(self, received):
        return _Owned(
            self._groups,
            self._addresses,
            received,
            self._columns,
            self._width,
        )

    def _owned_rows(self, received):
        return tf.stop_gradient(self._owned(received).rows())

    def _expanded(self, rows):
        """The rows of each request, whose gradients are pushed."""
        way, tables, width = self._way, self._tables, self._width
        owned = self._owned(way.received)
        arrivals = self._request.split(way.arrivals)

        @tf.custom_gradient
        def expand(*anchors_and_rows):
            *anchors, rows = anchors_and_rows

            def push(*gradients):
                for table in tables:
                    table.check_under_strategy()
                with tf.name_scope("push"):
                    # Summed per row here, then along the ids' own route: each
                    # owner already knows which rows these are.
                    padded = [
                        _padded(empty_parts.cut(of_request), length, width)
                        for of_request, length in zip(
                            gradients, self._lengths, strict=True
                        )
                    ]
                    summed = tf.math.unsorted_segment_sum(
                        _joined(padded), way.arrivals, way.num_sent
                    )
                    slices = owned.gradients(way.push(summed))
                    owned.note_touches(way, self._request)
                return *slices, None

            results = empty_parts.either(
                lambda: [
                    _cut(tf.gather(rows, arrival), length, width)
                    for arrival, length in zip(
                        arrivals, self._lengths, strict=True
                    )
                ],
                lambda: [
                    tf.zeros([count, length], rows.dtype)
                    for count, length in zip(
                        self._counts, self._lengths, strict=True
                    )
                ],
            )
            return (results[0] if len(results) == 1 else results), push

        anchors = [tf.convert_to_tensor(t.variable.value) for t in tables]
        results = expand(*anchors, rows)
        return [results] if len(arrivals) == 1 else list(results)


def _role_of(tables):
    """What the names of the messages of some tables begin with."""
    roles = [table.role for table in tables]
    if len(roles) == 1:
        return roles[0]
    digest = hashlib.blake2b("+".join(roles).encode(), digest_size=4)
    return f"tables/{len(roles)} from {roles[0]}/{digest.hexdigest()}"


def row_gradient(table, values, ids):
    shape = tf.constant([table.num_rows, table.dim], tf.int64)
    return tf.IndexedSlices(values, ids, shape)


def _joined(tensors):
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, axis=0)


def _padded(rows, length, width):
    """Rows of a length, as wide as others."""
    return (
        rows if length == width else tf.pad(rows, [[0, 0], [0, width - length]])
    )


def _cut(rows, length, width):
    """The same rows again."""
    return rows if length == width else rows[:, :length]


class _Request:
    """What this rank asks for: each row once.

    Attributes:
        numbers: of all ids, each table's counted from its first row's on.
        index: for each of them, the place of its row among those asked for.
    """

    def __init__(self, requests, groups, addresses):
        self._addresses = addresses
        self._tables = [tables[0] for tables, _ in requests]
        self._groups = [groups.index(tuple(tables)) for tables, _ in requests]
        self._largest = [_largest(ids) for _, ids in requests]
        numbers = [
            tf.cast(ids, addresses.row_dtype)
            + tf.constant(addresses.first_rows[group], addresses.row_dtype)
            for (_, ids), group in zip(requests, self._groups, strict=True)
        ]
        self._sizes = [tf.size(ids) for ids in numbers]
        self.numbers = _joined(numbers)

    def merge(self):
        """Finds its rows; where nothing is asked for, that can be left out."""
        if architectures.of().merges:
            self._unique, self.index = tf.unique(self.numbers)
        else:
            self._unique = self.numbers
            self.index = tf.range(tf.size(self.numbers))

    def split(self, of_ids):
        """What is of each id, by request."""
        if len(self._sizes) == 1:
            return [of_ids]
        return tf.split(of_ids, self._sizes)

    @property
    def num_rows(self):
        return tf.size(self._unique)

    def ids_of_group(self, index):
        """The ids that one group of tables is asked for."""
        first, *after = self._addresses.first_rows[index:]
        is_of_group = self._unique >= first
        if after:
            is_of_group &= self._unique < after[0]
        return tf.boolean_mask(self._unique, is_of_group) - first

    @property
    def dtype(self):
        return self._addresses.row_dtype

    @property
    def owner_and_address(self):
        return self._addresses.locate(self._unique)

    @property
    def is_inside(self):
        return tf.reduce_all(self._are_inside())

    def _are_inside(self):
        return [
            largest < tf.constant(table.num_rows, tf.uint64)
            for largest, table in zip(self._largest, self._tables, strict=True)
        ]

    @property
    def outside(self):
        """Which group was asked for an id outside, and the id: int64 `(2,)`."""
        which = tf.argmin(tf.cast(self._are_inside(), tf.int32))
        return tf.stack(
            [
                tf.gather(tf.constant(self._groups, tf.int64), which),
                tf.bitcast(tf.stack(self._largest), tf.int64)[which],
            ]
        )


def _largest(ids):
    """The largest id, where negative ones are larger than all others."""
    ids = tf.cast(ids, tf.int64)
    return tf.reduce_max(tf.bitcast(ids, tf.uint64))


def _checked(received, tables, addresses):
    """The addresses as numbers to compute with, if each is one."""
    told = marked(received)
    which, offending = tf.unstack(told)
    names = tf.constant([table.owner_name for table in tables])
    limits = tf.constant([table.num_rows for table in tables], tf.int64)
    check = tf.raw_ops.Assert(
        condition=tf.logical_not(tf.reduce_any(is_marked(received))),
        data=outside_message(
            tf.gather(names, which), offending, tf.gather(limits, which)
        ),
        name="ids_are_inside",
    )
    with tf.control_dependencies([check]):
        return tf.identity(tf.cast(received, addresses.row_dtype))


def outside_message(owner_name, offending, num_rows):
    """What to say of an id outside of a table: data of an Assert."""
    # In pieces, for a name and a number may be tensors.
    return [
        tf.strings.join(["'", owner_name, "' received the id"]),
        offending,
        tf.strings.join(
            [
                "but ids must lie in [0, ",
                tf.as_string(num_rows),
                "). Stock Keras reads the last row for -1; map such ids to a "
                "row of their own.",
            ]
        ),
    ]


class _Owned:
    """Rows of this rank that others have asked for, by their addresses."""

    def __init__(self, groups, addresses, received, columns, width):
        self._groups = groups
        self._columns, self._width = columns, width
        self._addresses = addresses
        self._received = received
        self._pieces = addresses.pieces
        if len(self._pieces) > 1:
            starts = self._constant(p.start for p in self._pieces)
            self._piece = num_up_to(starts, received) - 1
            self._local = received - tf.gather(starts, self._piece)
        else:
            self._piece, self._local = None, received

    def _constant(self, values):
        return tf.constant(list(values), self._received.dtype)

    def rows(self):
        if self._piece is None:
            group, slot = 0, 0  # a rank without rows is asked for none
            if self._pieces:
                group, slot = self._pieces[0].table, self._pieces[0].slot
            return self._read(group, slot, self._local)
        count = len(self._pieces)
        places = tf.range(tf.size(self._received))
        places = tf.dynamic_partition(places, self._piece, count)
        locals_ = tf.dynamic_partition(self._local, self._piece, count)
        rows = [
            self._read(piece.table, piece.slot, local)
            for piece, local in zip(self._pieces, locals_, strict=True)
        ]
        return tf.dynamic_stitch(places, rows)

    def _read(self, group, slot, local):
        rows = [
            tf.gather(table.partitions[slot].value, local)
            for table in self._groups[group]
        ]
        if self._columns is not None:
            return rows[0][:, slice(*self._columns)]
        length = sum(table.dim for table in self._groups[group])
        rows = rows[0] if len(rows) == 1 else tf.concat(rows, axis=1)
        return _padded(rows, length, self._width)

    def gradients(self, at_owner):
        """The `tf.IndexedSlices` of each table of each group, in order."""
        if self._columns is not None:
            start, stop = self._columns
            ((table,),) = self._groups
            at_owner = tf.pad(at_owner, [[0, 0], [start, table.dim - stop]])
        of_groups = self._by_group(at_owner, self._ids())
        slices = []
        for group, (values, ids) in zip(self._groups, of_groups, strict=True):
            dims = [table.dim for table in group]
            if self._columns is None:
                values = _cut(values, sum(dims), self._width)
            columns = [values]
            if len(group) > 1:
                columns = tf.split(values, dims, axis=1)
            slices += [
                row_gradient(table, of_table, ids)
                for table, of_table in zip(group, columns, strict=True)
            ]
        return slices

    def _ids(self):
        """The rows' ids in their tables."""
        if not self._pieces:
            return tf.cast(self._received, tf.int64)
        counts = self._constant(
            self._groups[p.table][0].layout.num_partitions for p in self._pieces
        )
        partitions = self._constant(p.partition for p in self._pieces)
        if self._piece is None:
            count, partition = counts[0], partitions[0]
        else:
            count = tf.gather(counts, self._piece)
            partition = tf.gather(partitions, self._piece)
        return tf.cast(self._local * count + partition, tf.int64)

    def _group_of_each(self):
        groups = tf.constant([p.table for p in self._pieces] or [0])
        if self._piece is None:
            return tf.fill([tf.size(self._received)], groups[0])
        return tf.gather(groups, self._piece)

    def _by_group(self, *tensors):
        count = len(self._groups)
        if count == 1:
            return [tensors]
        group = self._group_of_each()
        parts = [tf.dynamic_partition(t, group, count) for t in tensors]
        return list(zip(*parts, strict=True))

    def note_touches(self, way, request):
        def asked():
            # Each group's share of what all of them together are padded to.
            largest = tf.cast(way.route.largest, tf.int64)
            num_all = tf.maximum(tf.size(self._received, tf.int64), 1)
            of_groups = self._by_group(self._ids(), way.ranks)
            found = []
            for index, (ids, ranks) in enumerate(of_groups):
                share = largest * tf.size(ids, tf.int64) // num_all
                own_ids = None
                if way.is_together:
                    own_ids = request.ids_of_group(index)
                of_group = ids, ranks, share, own_ids
                found += [of_group] * len(self._groups[index])
            return found

        variables = [t.variable for group in self._groups for t in group]
        touches.note(variables, asked)


def split_gradient(table, gradient):
    """The gradient of each of this rank's partitions.

    Args:
        gradient: `tf.IndexedSlices` of rows that this rank owns, as
            `gather`'s gradient gives them.

    Returns:
        List of `tf.IndexedSlices` by local row, one for each partition.
    """
    local_rows = table.layout.local_row(tf.cast(gradient.indices, tf.int64))
    if len(table.partitions) == 1:
        rows, values = [local_rows], [gradient.values]
    else:
        slots = table.layout.owned_index(tf.cast(gradient.indices, tf.int64))
        count = len(table.partitions)
        rows = tf.dynamic_partition(local_rows, slots, count)
        values = tf.dynamic_partition(gradient.values, slots, count)
    return [
        tf.IndexedSlices(value, row, tf.constant(list(p.shape), tf.int64))
        for p, row, value in zip(table.partitions, rows, values, strict=True)
    ]
