"""Rows of the next step, which come while this one computes."""

import typing

import numpy as np
import tensorflow as tf

from keras_sparsity._tf.current_variable import rows_after_step
from keras_sparsity._tf.own_variable import OwnVariable
from keras_sparsity.collectives.engine import Route
from keras_sparsity.exchange.owned_rows import OwnedRows
from keras_sparsity.exchange.routes import by_owner, sorted_by

_SAME_BITS = {2: tf.int16, 4: tf.int32, 8: tf.int64}


class Ahead:
    """Asks for the next step's rows, and has them in the next step.

    When step t begins, the ids of step t + 1 go to their owners. Of the rows
    that these are asked for, an owner sends those in step t that nobody has
    asked for in step t, so that no gradient comes for them: they come *early*,
    behind the rows of step t, while it computes and nothing else is to be sent.
    The others come *late*, when step t + 1 begins.

    Rows that move without a gradient are sent as step t will leave them.

    That is a guess, which may be wrong: a callback assigns rows, a gradient
    that is not finite has step t left out, another layer trains the same
    table, another batch comes than was announced. So when step t + 1 begins,
    each owner compares the rows that it has sent early with their values by
    then, bit by bit, and each rank the ids that it has asked for with those of
    its batch. The late message of each owner to each rank begins with the
    outcome: every rank learns of every other, and after any difference all
    ranks pull anew. So a step always trains on the rows that an ordinary pull
    would give.

    After a step without an announcement all rows come late.

    Beside the rows travel two bytes for each, which tell whether it is late,
    and a row for each two ranks, the verdict; and there are up to three
    messages more in a step.

    Args:
        exchange: `Exchange`, whose rows have one length.
    """

    def __init__(self, exchange):
        self.exchange = exchange
        self._columns = columns = exchange.width
        dtype = exchange.tables[0].variable.dtype
        numbers = exchange.addresses.row_dtype
        each = [0] * exchange.communicator.size

        def of_some(dtype, *inner):
            none = np.zeros((0, *inner), tf.as_dtype(dtype).as_numpy_dtype)
            return OwnVariable(none, dtype, [None, *inner])

        # Of this rank, as the one that asks: ids, the place of each id's row
        # among those that come, which of these come late, and the others.
        self._numbers = of_some(numbers)
        self._arrivals = of_some(tf.int32)
        self._comes_late = of_some(tf.bool)
        self._early = of_some(dtype, columns)
        # As an owner: the addresses, which go late, and the others as sent.
        self._received = of_some(numbers)
        self._goes_late = of_some(tf.bool)
        self._sent = of_some(dtype, columns)
        self._route = [
            OwnVariable(value, tf.int32) for value in (each, each, 0)
        ]
        # The most rows that a rank sends late to another; 1 is the verdict.
        self._largest = OwnVariable(1, tf.int32)

    def announce(self, request):
        """Tells the owners which rows this rank needs in the next step.

        Args:
            request: `Request` of the next step.

        Returns:
            `Announced`.
        """
        exchange = self.exchange
        request.merge()
        is_inside = tf.reduce_all(request.are_inside)
        arrivals, received, route = self._ask(request, is_inside)
        received = tf.cast(received, exchange.addresses.row_dtype)
        # It is not known yet whether this step's ids are those announced, but
        # will be before any row that was sent early is used.
        touched = self._received.read()
        goes_late = _is_among(received, touched) | (tf.size(touched) == 0)
        comes_late = exchange.communicator.all_to_all_back(
            tf.cast(goes_late, tf.uint16),
            route,
            name=f"{exchange.role}/pull/next/which",
        )
        comes_late = tf.cast(comes_late, tf.bool)
        goes_early = tf.logical_not(goes_late)
        early_route, most_late = self._early_route(
            route, goes_early, tf.logical_not(comes_late)
        )
        # No batch is none: rows not asked for are not found to be right.
        num_numbers = tf.where(is_inside, tf.size(request.numbers), 0)
        return Announced(
            request.numbers[:num_numbers],
            arrivals,
            received,
            route,
            goes_late,
            comes_late,
            early_route,
            most_late,
            # Now, when the processor is idle: later, it computes gradients.
            OwnedRows(exchange, tf.boolean_mask(received, goes_early)).rows(
                rows_after_step
            ),
        )

    def _ask(self, request, is_inside):
        """Sends the addresses; `RowRoute`'s arrivals, received and parts."""
        exchange, size = self.exchange, self.exchange.communicator.size

        def nothing():  # an id is outside: the next step is to say so
            return (
                tf.zeros([0], exchange.addresses.dtype),
                tf.zeros([tf.size(request.rows)], tf.int32),
                tf.zeros([size], tf.int32),
            )

        sent, positions, splits = tf.cond(
            is_inside, lambda: by_owner(request), nothing
        )
        received, route = exchange.communicator.all_to_all(
            sent, splits, name=f"{exchange.role}/pull/next/ids"
        )
        return tf.gather(positions, request.index), received, route

    def _early_route(self, route, goes_early, comes_early):
        """`Route` of the early rows; the largest number of late ones."""
        communicator = self.exchange.communicator
        size = communicator.size
        counts = _counts(tf.boolean_mask(route.senders, goes_early), size)
        late_counts = route.received_splits - counts
        largest = [tf.reduce_max(counts), 1 + tf.reduce_max(late_counts)]
        if communicator.pads:
            (largest,) = communicator.all_reduce(
                [tf.stack(largest)],
                op="max",
                name=f"{self.exchange.role}/pull/next/largest",
            )
        received = _counts(tf.boolean_mask(route.receivers, comes_early), size)
        return Route(counts, received, largest[0]), largest[1]

    def pull(self, request):
        """Has the late rows of this step sent.

        Args:
            request: `Request` of this step.

        Returns:
            `Late`.
        """
        received = self._received.read()
        route = Route(*(part.read() for part in self._route))
        rows, is_right = self._rows(request, received, route)
        return Late(rows, is_right, self._arrivals.read(), received, route)

    def send(self, announced, behind):
        """Sends the early rows of the next step.

        Args:
            announced: result of `announce`.
            behind: list of tensors that are waited for.
        """
        # By then only sending is left to do: a processor has other work.
        with tf.control_dependencies(behind):
            early = self.exchange.pull_wire.carry(
                tf.identity(announced.rows),
                self.exchange.communicator.all_to_all_along,
                announced.early_route,
                name=f"{self.exchange.role}/pull/next/rows",
            )
        self._numbers.assign(announced.numbers)
        self._arrivals.assign(announced.arrivals)
        self._comes_late.assign(announced.comes_late)
        self._early.assign(early)
        self._received.assign(announced.received)
        self._goes_late.assign(announced.goes_late)
        self._sent.assign(announced.rows)
        for variable, part in zip(
            self._route, _parts(announced.route), strict=True
        ):
            variable.assign(part)
        self._largest.assign(announced.most_late)

    def _rows(self, request, received, route):
        """The early rows and the late ones; and whether all are right."""
        exchange, size = self.exchange, self.exchange.communicator.size
        goes_late = self._goes_late.read()
        owned = OwnedRows(exchange, received).rows()
        late, now = (
            tf.boolean_mask(owned, which)
            for which in (goes_late, tf.logical_not(goes_late))
        )
        is_right = is_same(request.numbers, self._numbers.read()) & is_same(
            _bits(now), _bits(self._sent.read())
        )
        asker = route.senders
        verdicts = tf.fill([size, self._columns], tf.cast(is_right, now.dtype))
        destination = tf.concat(
            [tf.range(size), tf.boolean_mask(asker, goes_late)], axis=0
        )
        order, _, splits = sorted_by(
            destination, tf.range(tf.size(destination)), size, tf.int32
        )
        message = tf.gather(tf.concat([verdicts, late], axis=0), order)

        comes_late = self._comes_late.read()
        owner = route.receivers
        received_splits = 1 + _counts(tf.boolean_mask(owner, comes_late), size)
        arrived = exchange.pull_wire.carry(
            message,
            exchange.communicator.all_to_all_along,
            Route(splits, received_splits, self._largest.read()),
            name=f"{exchange.role}/pull/late/rows",
        )
        starts = tf.cumsum(received_splits, exclusive=True)
        is_right = tf.reduce_all(tf.gather(arrived, starts)[:, 0] > 0)

        rows = _in_place(self._early.read(), arrived, comes_late, owner)
        rows.set_shape([None, self._columns])
        return rows, is_right


class Announced(typing.NamedTuple):
    """The known facts of the next step: see `Ahead.__init__`."""

    numbers: tf.Tensor
    arrivals: tf.Tensor
    received: tf.Tensor
    route: Route
    goes_late: tf.Tensor
    comes_late: tf.Tensor
    early_route: Route
    most_late: tf.Tensor
    rows: tf.Tensor

    @property
    def last_messages(self):
        """Tensors that are there when all that tells of rows has come."""
        return [self.comes_late, self.most_late]


class Late(typing.NamedTuple):
    """The rows of this step, if they are what they were announced to be.

    Attributes:
        rows: `(num_sent, columns)`.
        is_right: whether they are, the same on all ranks.
        arrivals, received, route: how they have come, as `Direct` has it.
    """

    rows: tf.Tensor
    is_right: tf.Tensor
    arrivals: tf.Tensor
    received: tf.Tensor
    route: Route

    def settle(self, route, pull):
        """The rows of this step, pulled now where they are not right.

        Args:
            route: `Direct`, which goes on with the way the rows came.
            pull: function that pulls the rows now, by `route`.

        Returns:
            `(num_sent, columns)`.
        """

        def resume():
            return self.rows, self.arrivals, self.received, *_parts(self.route)

        def anew():
            rows = pull()
            return rows, route.arrivals, route.received, *_parts(route.parts)

        rows, arrivals, received, *parts = tf.cond(self.is_right, resume, anew)
        rows.set_shape([None, self.rows.shape[-1]])
        route.resume(arrivals, tf.shape(rows)[0], received, Route(*parts))
        return rows


def _in_place(early, late, comes_late, owner):
    """Early and late rows in the order in which they were asked for.

    The verdict of each owner precedes its rows in `late`.
    """
    is_late = tf.cast(comes_late, tf.int32)
    place = tf.where(
        comes_late,
        tf.shape(early)[0] + tf.cumsum(is_late) + owner,
        tf.cumsum(1 - is_late) - 1,
    )
    return tf.gather(tf.concat([early, late], axis=0), place)


def _parts(route):
    return route.splits, route.received_splits, route.largest


def _counts(ranks, size):
    return tf.math.bincount(ranks, minlength=size, maxlength=size)


def _is_among(values, others):
    """Of each value, whether it is one of the others."""
    _, index = tf.unique(tf.concat([others, values], axis=0))
    of_others, of_values = tf.split(index, [tf.size(others), tf.size(values)])
    return of_values <= tf.reduce_max(tf.concat([of_others, [-1]], axis=0))


def _bits(rows):
    return tf.bitcast(rows, _SAME_BITS[rows.dtype.size])


def is_same(a, b):
    """Whether two tensors are, which may be of different lengths."""
    size = tf.minimum(tf.shape(a)[0], tf.shape(b)[0])
    is_as_long = tf.equal(tf.shape(a)[0], tf.shape(b)[0])
    return is_as_long & tf.reduce_all(tf.equal(a[:size], b[:size]))
