"""The route of rows by way of machines: local aggregation."""

import tensorflow as tf

from keras_sparsity.collectives.wire import Wire
from keras_sparsity.exchange.layout import narrowest
from keras_sparsity.exchange.lengths import LengthCarrier
from keras_sparsity.exchange.routes import (
    Carrier,
    RowRoute,
    is_marked,
    marked,
    sorted_by,
    told_to_all,
)
from keras_sparsity.machines.topology import topologies


class ThroughMachines(RowRoute):
    """First inside of each machine, then between machines.

    Each process serves its machine for the owners with its own local rank: it
    asks them once for the rows that the machine's processes need, and sums
    the gradients of these rows, so that a row crosses the network once for
    each machine.

    Args:
        exchange: `Exchange`.

    References:
        EuroSys 4.3 (local aggregation, of gradients).
    """

    is_by_machine = True

    def __init__(self, exchange):
        self._exchange = exchange
        communicator = exchange.communicator
        self._machines, self._rank = communicator.machines, communicator.rank
        self._machine = communicator.group("machine")
        self._across = communicator.group("across")
        # A code is the machine of an owner and the address there, as one
        # number: how it travels, and is computed with.
        num_codes = self._across.size * exchange.addresses.largest
        row_dtype = exchange.addresses.row_dtype
        self._code_dtype = narrowest(num_codes)
        self._compute = row_dtype if num_codes < row_dtype.max else tf.int64

    def ask(self, request):
        role = self._exchange.role
        request.merge()
        codes, positions, splits = self._by_local_rank(request)
        self.arrivals = tf.gather(positions, request.index)
        self.num_sent = tf.size(codes)
        asked, route = self._machine.all_to_all(
            codes, splits, name=f"{role}/pull/machine/ids"
        )
        self._inside = Carrier(self._machine, route)
        sent, positions, splits, index = self._by_machine(asked)
        self._num_asked = tf.size(sent)
        self._arrival = tf.gather(positions, index)
        self.received, self.parts = self._across.all_to_all(
            sent, splits, name=f"{role}/pull/ids"
        )
        self._between = Carrier(self._across, self.parts)
        self._asked = route, codes, asked, sent

    def _by_local_rank(self, request):
        """The codes of a request, for the processes of this machine."""
        addresses, size = self._exchange.addresses, self._machine.size
        local_ranks = [place.local_rank for place in topologies(self._machines)]

        def valid():
            owner, address = addresses.locate(request.rows)
            machine = tf.gather(tf.constant(self._machines), owner)
            code = tf.cast(machine, self._compute) * addresses.largest
            code += tf.cast(address, self._compute)
            local_rank = tf.gather(tf.constant(local_ranks), owner)
            return sorted_by(local_rank, code, size, self._code_dtype)

        return tf.cond(
            tf.reduce_all(request.are_inside),
            valid,
            lambda: told_to_all(
                request.outside(), size, self._code_dtype, request.rows
            ),
        )

    def _by_machine(self, asked):
        """Each code once, for its owner; and the place of each."""
        addresses, size = self._exchange.addresses, self._across.size
        codes, index = tf.unique(tf.cast(asked, self._compute))
        machine, address = codes // addresses.largest, codes % addresses.largest
        sent, positions, splits = tf.cond(
            tf.reduce_any(is_marked(asked)),
            lambda: told_to_all(marked(asked), size, addresses.dtype, codes),
            lambda: sorted_by(machine, address, size, addresses.dtype),
        )
        return sent, positions, splits, index

    def _find_lengths(self):
        """Lengths of the rows on both routes."""
        route, codes, asked, sent = self._asked
        exchange, lengths = self._exchange, self._exchange.lengths
        largest = exchange.addresses.largest

        def pieces(codes, local_rank):
            codes = tf.cast(codes, tf.int64)
            machine = tf.cast(codes // largest, tf.int32)
            owner = self._ranks_at(machine, local_rank)
            return lengths.pieces(owner, codes % largest)

        self._inside = LengthCarrier(
            self._machine,
            route,
            lengths,
            pieces(codes, route.receivers),
            pieces(asked, self._machine.rank),
            f"{exchange.role}/machine",
        )
        owners = self._ranks_at(self.parts.receivers, self._machine.rank)
        self._between = LengthCarrier(
            self._across,
            self.parts,
            lengths,
            lengths.pieces(owners, sent),
            lengths.pieces(self._rank, self.received),
            exchange.role,
        )

    def _ranks_at(self, machine, local_rank):
        """The ranks of these places, which all machines have."""
        places = topologies(self._machines)
        order = sorted(
            range(len(places)),
            key=lambda rank: (places[rank].local_rank, self._machines[rank]),
        )
        place = machine + local_rank * self._across.size
        return tf.gather(order, tf.clip_by_value(place, 0, len(order) - 1))

    @property
    def ranks(self):
        first = [self._machines.index(i) for i in range(self._across.size)]
        return tf.gather(first, self.parts.senders)

    def pull(self, rows):
        if self._exchange.lengths is not None:
            # Behind the check of the addresses, as the rows are.
            with tf.control_dependencies([rows]):
                self._find_lengths()
        role, wire = self._exchange.role, self._exchange.pull_wire
        rows = self._between.back(rows, f"{role}/pull/rows", wire)
        return self._inside.back(
            tf.gather(rows, self._arrival), f"{role}/pull/machine/rows", wire
        )

    def push(self, gradients):
        role, dtype = self._exchange.role, gradients.dtype
        gradients = self._inside.along(
            gradients, f"{role}/push/machine/rows", Wire(dtype, dtype)
        )
        summed = tf.math.unsorted_segment_sum(
            gradients, self._arrival, self._num_asked
        )
        return self._between.along(
            summed, f"{role}/push/rows", self._exchange.push_wire
        )
