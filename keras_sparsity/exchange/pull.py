"""Pulls rows from their owners; their gradients are pushed back."""

import abc

import tensorflow as tf

from keras_sparsity._tf import xla
from keras_sparsity.collectives import order
from keras_sparsity.data import empty_parts
from keras_sparsity.exchange.exchange import exchange_of
from keras_sparsity.exchange.owned_rows import OwnedRows, checked, padded


class Pull(abc.ABC):
    """One exchange of rows in a step, in the phases of `in_turn`.

    Each phase waits for the tensors `behind`. Phases that return a list
    return tensors that exist when the phase's messages have arrived.

    Attributes:
        is_prefetched: whether the step before has asked for its rows: then it
            has `resume` and `finish`, see `PrefetchedPull`.
        sent: list of the tensors that this rank sends in `rows`.
        arrived: after `rows`: each row that this rank asks for, once.
    """

    is_prefetched = False

    @abc.abstractmethod
    def ask(self):
        """Sends the owners the addresses of rows; a list of tensors."""

    @abc.abstractmethod
    def check(self, behind):
        """Ends the step if an id is outside; a list of tensors."""

    @abc.abstractmethod
    def rows(self, behind):
        """Sends the rows: a list of `(n, columns)`, one for each request."""


def in_turn(pulls):
    """The rows of several `Pull`s of a step, which come in this order.

    All addresses travel before any rows. In other orders the addresses of a
    later pull wait for the rows of earlier ones, and owners gather their rows
    late. Rows of the next step come last.

    An id outside of its table ends the step on all ranks. It is found while
    no message is under way and no sum of all ranks: others would wait forever
    for a message that an aborting rank never sent.

    Returns:
        List of the result of each pull's `rows`.
    """
    # The name in a profiler's trace.
    with xla.not_compiled(), tf.name_scope("pull"):
        behind = [tensor for pull in pulls for tensor in pull.ask()]
        prefetched = [pull for pull in pulls if pull.is_prefetched]
        behind += [t for pull in prefetched for t in pull.resume(behind)]
        for pull in pulls:
            behind = pull.check(behind)
        order.hold_sums(behind)
        results = []
        for pull in pulls:
            results.append(pull.rows(behind))
            behind = pull.sent or behind
        arrived = [pull.arrived for pull in pulls]
        for pull in prefetched:
            pull.finish(arrived)
    return results


class PullNow(Pull):
    """Asks for rows and receives them in one step.

    The addresses of distinct rows go to the owners and the rows come back;
    the row gradients, summed over this rank's ids, travel the addresses'
    route once more: three messages for any number of tables.

    Args:
        requests: list of `(tables, ids)`, ids an integer tensor `(n,)`: each
            of the `ShardedTable`s, which have one `Layout`, is asked for the
            same rows. All tables have one dtype.
        options, columns, cast_to: as for `Exchange`.

    References:
        EuroSys 3.1 (pull and push), 4.3 (one gradient for each row); arXiv
        5.3.2 (operations that make data smaller, where the data is).
    """

    def __init__(self, requests, options, columns=None, cast_to=None):
        self._exchange = exchange_of(requests, options, columns, cast_to)
        self._request = Request(self._exchange, requests)
        self._route = self._exchange.route(self._exchange)
        self._owned = None
        self.sent, self.arrived = [], None

    def ask(self):
        self._route.ask(self._request)
        return [self._route.received]

    def check(self, behind):
        with tf.control_dependencies(behind):
            addresses = checked(self._exchange, self._route.received)
            self._owned = OwnedRows(self._exchange, addresses)
        return [addresses]

    def rows(self, behind):
        with tf.control_dependencies(behind):
            self.sent = [self._owned.rows()]
            self.arrived = self._route.pull(*self.sent)
        return expanded(self._request, self._route, self._owned, self.arrived)


class Request:
    """The rows that this rank needs in one step.

    Args:
        exchange: `Exchange`.
        requests: list of `(tables, ids)`: a group of tables, and the ids of
            its rows, an integer tensor `(n,)`.
        cut: function that removes the ids of a rank without examples: it
            needs no rows, and adds to none.

    Attributes:
        numbers: integers `(n,)`, the number of each id's row among the rows
            of all tables, see `Addresses`.
        counts: list of the number of ids of each request.
        sizes: the same, of those that are left by `cut`.
        are_inside: list of bool tensors: of each request, whether all ids lie
            in its tables.
        rows: after `merge`: the numbers that owners are asked for.
        index: after `merge`: of each id, the place of its row in `rows`.
    """

    def __init__(self, exchange, requests, cut=empty_parts.cut):
        self.exchange = exchange
        addresses = exchange.addresses
        self.counts = [tf.size(ids) for _, ids in requests]
        ids = [cut(ids) for _, ids in requests]
        self.groups = [exchange.groups.index(tuple(of)) for of, _ in requests]
        # Without their signs negative ids are larger than all others.
        self._largest = [
            tf.reduce_max(tf.bitcast(tf.cast(each, tf.int64), tf.uint64))
            for each in ids
        ]
        self.are_inside = [
            largest < tf.constant(exchange.groups[group][0].num_rows, tf.uint64)
            for largest, group in zip(self._largest, self.groups, strict=True)
        ]
        self.sizes = [tf.size(each) for each in ids]
        self.numbers = tf.concat(
            [
                tf.cast(each, addresses.row_dtype)
                + tf.constant(addresses.first_rows[group], addresses.row_dtype)
                for each, group in zip(ids, self.groups, strict=True)
            ],
            axis=0,
        )
        self.rows = self.index = None

    def merge(self):
        """Finds the rows; needless where none are asked for."""
        if self.exchange.options.merges:
            self.rows, self.index = tf.unique(self.numbers)
        else:
            self.rows = self.numbers
            self.index = tf.range(tf.size(self.numbers))

    def outside(self):
        """The group that an id is outside of, and the id: int64 `(2,)`."""
        which = tf.argmin(tf.cast(self.are_inside, tf.int32))
        return tf.stack(
            [
                tf.gather(tf.constant(self.groups, tf.int64), which),
                tf.bitcast(tf.stack(self._largest), tf.int64)[which],
            ]
        )

    def ids_of(self, group):
        """The distinct ids that a group of tables is asked for."""
        first, *after = self.exchange.addresses.first_rows[group:]
        is_of_group = self.rows >= first
        if after:
            is_of_group &= self.rows < after[0]
        return tf.boolean_mask(self.rows, is_of_group) - first


def expanded(request, route, owned, rows):
    """The rows of each request, whose gradients are pushed to the owners.

    Args:
        request: `Request`.
        route: `RowRoute` by which the rows came.
        owned: `OwnedRows` that this rank was asked for.
        rows: `(route.num_sent, width)`, each row once.

    Returns:
        List of tensors `(n, columns)`, of the tables' dtype: the rows of a
        request's tables side by side.
    """
    exchange = request.exchange
    places, sizes = route.arrivals, request.sizes
    arrivals = tf.split(places, sizes) if sizes[1:] else [places]
    lengths = [exchange.row_lengths[group] for group in request.groups]

    def push(*gradients):
        _check_under_strategy(exchange)
        with xla.not_compiled(), tf.name_scope("push"):
            # Summed per row here, then along the addresses' own route: each
            # owner already knows which rows these are.
            of_requests = map(empty_parts.cut_gradient, gradients)
            of_ids = [
                padded(each, length, exchange.width)
                for each, length in zip(of_requests, lengths, strict=True)
            ]
            summed = tf.math.unsorted_segment_sum(
                tf.concat(of_ids, axis=0), route.arrivals, route.num_sent
            )
            slices = owned.gradients(route.push(summed))
            owned.note_touches(route, request)
        return *slices, None

    @tf.custom_gradient
    def expand(*anchors_and_rows):
        rows = anchors_and_rows[-1]
        results = empty_parts.either(
            lambda: [
                _cut(tf.gather(rows, arrival), length, exchange.width)
                for arrival, length in zip(arrivals, lengths, strict=True)
            ],
            lambda: [
                tf.zeros([count, length], rows.dtype)
                for count, length in zip(request.counts, lengths, strict=True)
            ],
        )
        return results, push

    return list(expand(*map(_anchor, exchange.tables), rows))


def _anchor(table):
    """The tensor with respect to which gradients of a table are taken."""
    value = tf.convert_to_tensor(table.variable.value)
    # Tapes watch it in any case, and nobody asks for a frozen one's gradient,
    # whose messages TensorFlow would send.
    return value if table.variable.trainable else tf.stop_gradient(value)


def _check_under_strategy(exchange):
    """Raises where training would go on without any aggregation."""
    if not hasattr(tf.distribute.get_strategy(), "collectives"):
        raise ValueError(
            f"'{exchange.tables[0].owner_name}' is spread over "
            f"{exchange.communicator.size} processes, but is trained outside "
            "of a strategy: gradients would not be aggregated. Write "
            "`with strategy.scope(): model.compile(...)`, or, in a custom "
            "training loop, `strategy.run(train_step, args=(batch,))`, "
            "with a `ks.HybridStrategy()`."
        )


def _cut(rows, length, width):
    """Removes the columns that `padded` added."""
    return rows if length == width else rows[:, :length]


def shaped(rows, ids):
    """Rows `(n, dim)` as `(..., dim)`, for n ids of shape `(...)`."""
    dim = rows.shape[-1]
    rows = tf.reshape(rows, tf.concat([tf.shape(ids), [dim]], axis=0))
    rows.set_shape([*ids.shape, dim])
    if not tf.executing_eagerly():  # for `global_batch.batch_axes`
        rows, _ = tf.identity_n([rows, ids], name="rows_of_ids")
    return rows
