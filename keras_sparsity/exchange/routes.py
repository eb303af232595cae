"""The ways of rows between ranks: straight, or by way of their machines."""

import tensorflow as tf

from keras_sparsity.exchange.addresses import is_marked, mark, marked, narrowest
from keras_sparsity.exchange.lengths import Carrier
from keras_sparsity.machines.topology import topologies


class Direct:
    """From each rank to each owner.

    Args:
        communicator: `Collectives` of all ranks.
        role: what the names of the messages begin with.
        pull_wire, push_wire: `Wire` of rows, and of their gradients.
        lengths: `Lengths` of the rows, None if they have one.

    Attributes:
        arrivals: for each id that was asked for, the place of its row among
            those that come.
        num_sent: how many these are.
        received: addresses that this rank was asked for.
        route: their way, for what is noted of it.
        is_together: whether it is machines that ask.
    """

    is_together = False

    def __init__(self, communicator, role, pull_wire, push_wire, lengths=None):
        self._ranks, self._role = communicator, role
        self._pull_wire, self._push_wire = pull_wire, push_wire
        self._lengths = lengths

    def ask(self, request, addresses):
        """Sends each owner the addresses of what is wanted of it.

        Args:
            request: what this rank asks for, see `exchange`.
            addresses: `Addresses`.
        """
        size = self._ranks.size

        def valid():
            owner, address = request.owner_and_address
            return sorted_by(owner, address, size, addresses.dtype)

        def offending():
            return _to_all(
                request.outside, size, addresses.dtype, request.num_rows
            )

        sent, positions, splits = tf.cond(request.is_inside, valid, offending)
        received, route = self._ranks.all_to_all(
            sent, splits, name=f"{self._role}/pull/ids"
        )
        arrivals = tf.gather(positions, request.index)
        self._sent = sent
        self.resume(arrivals, tf.size(sent), received, route)

    def resume(self, arrivals, num_sent, received, route):
        """Goes on with what was asked for before: its attributes."""
        self.arrivals, self.num_sent = arrivals, num_sent
        self.received, self.route = received, route
        self._carrier = Carrier(self._ranks, route)

    @property
    def ranks(self):
        """The rank that has asked for each address."""
        return self.route.senders

    def pull(self, rows):
        """From the owner: rows `(num_sent, columns)` in their places."""
        if self._lengths is not None:
            with tf.control_dependencies([rows]):  # which are seen to be some
                self._carrier = Carrier(
                    self._ranks,
                    self.route,
                    self._lengths,
                    self._lengths.pieces(self.route.receivers, self._sent),
                    self._lengths.pieces(self._ranks.rank, self.received),
                    self._role,
                )
        return self._pull_wire.carry(
            rows, self._carrier.back, name=f"{self._role}/pull/rows"
        )

    def push(self, gradients):
        """To the owner: the gradients of what `received` lists."""
        return self._push_wire.carry(
            gradients, self._carrier.along, name=f"{self._role}/push/rows"
        )


class ThroughMachines:
    """First inside of each machine, then between machines.

    Of a machine's processes each takes part for the owners with its own local
    rank: what the others need of these it asks for once, and the gradients
    that they have of them it adds up, so that a row crosses the network once
    for each machine. Arguments and attributes are those of `Direct`.

    References:
        EuroSys 4.3 (local aggregation, of gradients).
    """

    is_together = True

    def __init__(self, communicator, role, pull_wire, push_wire, lengths=None):
        self._machines, self._rank = communicator.machines, communicator.rank
        self._machine = communicator.group("machine")
        self._across = communicator.group("across")
        self._role = role
        self._pull_wire, self._push_wire = pull_wire, push_wire
        self._lengths = lengths

    def ask(self, request, addresses):
        machines = tf.constant(self._machines)
        local_ranks = tf.constant(
            [place.local_rank for place in topologies(self._machines)]
        )
        num_machines = self._across.size
        # Which machine's owner, and the address there, as one number.
        dtype = narrowest(num_machines * addresses.largest)
        compute = request.dtype
        if num_machines * addresses.largest >= compute.max:
            compute = tf.int64

        def valid():
            owner, address = request.owner_and_address
            machine = tf.cast(tf.gather(machines, owner), compute)
            code = machine * addresses.largest + tf.cast(address, compute)
            local_rank = tf.gather(local_ranks, owner)
            return sorted_by(local_rank, code, self._machine.size, dtype)

        def offending():
            return _to_all(
                request.outside, self._machine.size, dtype, request.num_rows
            )

        codes, positions, splits = tf.cond(request.is_inside, valid, offending)
        self.arrivals = tf.gather(positions, request.index)
        self.num_sent = tf.size(codes)
        asked, route = self._machine.all_to_all(
            codes, splits, name=f"{self._role}/pull/machine/ids"
        )
        self._inside = Carrier(self._machine, route)
        unique, index = tf.unique(tf.cast(asked, compute))

        def ask():
            machine = unique // addresses.largest
            address = unique % addresses.largest
            return sorted_by(machine, address, num_machines, addresses.dtype)

        def tell():
            return _to_all(
                marked(asked), num_machines, addresses.dtype, tf.size(unique)
            )

        sent, positions, splits = tf.cond(
            tf.reduce_any(is_marked(asked)), tell, ask
        )
        self._num_asked = tf.size(sent)
        self._arrival = tf.gather(positions, index)
        self.received, self.route = self._across.all_to_all(
            sent, splits, name=f"{self._role}/pull/ids"
        )
        self._between = Carrier(self._across, self.route)
        self._asked = route, codes, asked, sent, addresses.largest

    def _find_lengths(self):
        """Of the rows on both routes."""
        route, codes, asked, sent, largest = self._asked

        def pieces(codes, local_rank):
            codes = tf.cast(codes, tf.int64)
            machine = tf.cast(codes // largest, tf.int32)
            owner = self._ranks_at(machine, local_rank)
            return self._lengths.pieces(owner, codes % largest)

        self._inside = Carrier(
            self._machine,
            route,
            self._lengths,
            pieces(codes, route.receivers),
            pieces(asked, self._machine.rank),
            f"{self._role}/machine",
        )
        owners = self._ranks_at(self.route.receivers, self._machine.rank)
        self._between = Carrier(
            self._across,
            self.route,
            self._lengths,
            self._lengths.pieces(owners, sent),
            self._lengths.pieces(self._rank, self.received),
            self._role,
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
        """A rank of the machine that has asked for each address."""
        first = [self._machines.index(i) for i in range(self._across.size)]
        return tf.gather(first, self.route.senders)

    @staticmethod
    def is_possible(communicator):
        """Whether there are machines, with several processes on each."""
        machines = communicator.machines
        counts = [machines.count(machine) for machine in machines]
        return min(counts) == max(counts) and 1 < min(counts) < len(machines)

    def pull(self, rows):
        if self._lengths is not None:
            with tf.control_dependencies([rows]):  # which are seen to be some
                self._find_lengths()
        return self._pull_wire.carry(rows, self._send_back)

    def _send_back(self, rows):
        rows = self._between.back(rows, f"{self._role}/pull/rows")
        return self._inside.back(
            tf.gather(rows, self._arrival), f"{self._role}/pull/machine/rows"
        )

    def push(self, gradients):
        gradients = self._inside.along(
            gradients, f"{self._role}/push/machine/rows"
        )
        summed = tf.math.unsorted_segment_sum(
            gradients, self._arrival, self._num_asked
        )
        return self._push_wire.carry(
            summed, self._between.along, name=f"{self._role}/push/rows"
        )


def sorted_by(destination, values, size, dtype):
    """Values by destination, the position of each, and the splits."""
    destination = tf.cast(destination, tf.int32)
    order = tf.concat(
        tf.dynamic_partition(tf.range(tf.size(values)), destination, size),
        axis=0,
    )
    return (
        tf.gather(tf.cast(values, dtype), order),
        tf.math.invert_permutation(order),
        tf.math.bincount(destination, minlength=size, maxlength=size),
    )


def _to_all(numbers, size, dtype, num_rows):
    """The same, of a message to all in place of what was to be sent."""
    message = mark(numbers, dtype)
    return (
        tf.concat([message] * size, axis=0),
        tf.zeros([num_rows], tf.int32),  # of no use
        tf.fill([size], tf.size(message)),
    )
