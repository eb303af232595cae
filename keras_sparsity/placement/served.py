"""Every rank holds the whole variable; servers sum dense gradients.

The paper compares its architecture with these.
"""

import dataclasses

from keras_sparsity.data import empty_parts
from keras_sparsity.placement import server_sums
from keras_sparsity.placement.base import Placement, Reducer
from keras_sparsity.placement.gathered import AllGather
from keras_sparsity.planning.engine_cost import engine_bytes


class Servers(Reducer):
    """Sums dense gradients in one message, in even parts at all servers."""

    path = "ps"
    role = server_sums.ROLE

    @classmethod
    def reduce(cls, updates, communicator, options):
        gradients = empty_parts.selected([u.gradient for u in updates])
        sums = server_sums.at_all(communicator, options, gradients)
        for update, value in zip(updates, sums, strict=True):
            update.gradient = value

    @classmethod
    def num_parts(cls, size):
        return size


class NaiveServers(Reducer):
    """Sums each dense gradient in messages of its own, at one server."""

    path = "ps"
    role = server_sums.ROLE

    @classmethod
    def reduce(cls, updates, communicator, options):
        gradients = empty_parts.selected([u.gradient for u in updates])
        sums = server_sums.in_turn(communicator, options, gradients)
        for update, value in zip(updates, sums, strict=True):
            update.gradient = value

    @classmethod
    def transfer_bytes(cls, spec, traffic):
        spec = dataclasses.replace(spec, num_partitions=1)
        return engine_bytes(spec, cls.path, *traffic.facts(traffic.machine))


class Served(Placement):
    """All servers sum a part of the dense gradients; rows are gathered.

    References:
        EuroSys 3.1 (parameter server, of dense variables), Table 4 (optimized
        PS).
    """

    name = "ps"
    reducers = Servers, AllGather


class NaivelyServed(Placement):
    """One server sums a variable's dense gradient; rows are gathered.

    References:
        EuroSys Table 4 (naive PS).
    """

    name = "ps"
    reducers = NaiveServers, AllGather
