"""Sums of dense gradients by way of servers."""

import tensorflow as tf

from keras_sparsity.collectives.engine import Route
from keras_sparsity.collectives.wire import Wire

# The beginning of its messages' names.
ROLE = "optimizer/servers/"


def at_all(communicator, options, gradients, name=ROLE):
    """Sums gradients of one dtype in one message, in even parts.

    Each process is a server, too. A parameter server and its workers send
    each other the gradient and the updated variable. Here the server sends
    the sum, which is as long, and each rank updates its own copy: nothing
    else in the step depends on who does. Where a machine's processes
    aggregate locally, they sum their gradients before they push, and pull the
    sum once, so that it crosses the network once for each machine.

    Args:
        communicator: `Collectives` of all ranks.
        options: `Options`.
        gradients: list of dense tensors, of the same shapes on all ranks.
        name: beginning of the names of its messages.

    Returns:
        List of their sums over the ranks.

    References:
        EuroSys 4.3 (local aggregation).
    """
    results = [None] * len(gradients)
    of_dtypes = {}
    for index, gradient in enumerate(gradients):
        of_dtypes.setdefault(gradient.dtype, []).append(index)
    for indices in of_dtypes.values():
        sums = _sums(
            communicator, options, [gradients[i] for i in indices], None, name
        )
        for index, value in zip(indices, sums, strict=True):
            results[index] = value
    return results


def in_turn(communicator, options, gradients):
    """Sums each gradient at one server; the servers take turns.

    The native engine pads a message to `size` times the gradient. Arguments
    and result are those of `at_all`.
    """
    return [
        _sums(communicator, options, [gradient], index, f"{ROLE}{index}/")[0]
        for index, gradient in enumerate(gradients)
    ]


def _sums(communicator, options, gradients, server, role):
    """The sums of gradients that travel together."""
    flat = [tf.reshape(gradient, [-1]) for gradient in gradients]
    total = _sum(communicator, options, tf.concat(flat, axis=0), server, role)
    parts = tf.split(total, [tf.size(part) for part in flat])
    return [
        tf.ensure_shape(tf.reshape(part, tf.shape(gradient)), gradient.shape)
        for gradient, part in zip(gradients, parts, strict=True)
    ]


def _sum(communicator, options, flat, server, role):
    """The sum of a flat tensor, at one server, or in even parts at all."""
    wire = options.wire(flat.dtype)
    if server is not None or not options.goes_through_machines(communicator):
        return _served(communicator, flat, server, role, wire, wire)
    # Each of a machine's processes has a part, as long as those of the same
    # local rank on other machines.
    return _served(
        communicator.group("machine"),
        flat,
        server,
        role,
        Wire(flat.dtype, flat.dtype),  # cast where it leaves the machine
        wire,
        lambda part: _served(
            communicator.group("across"), part, server, role, wire, wire
        ),
    )


def _splits(count, size, server):
    """Number of elements for each server, int32: even parts, or all for one."""
    if server is not None:
        return count * tf.one_hot(server % size, size, dtype=tf.int32)
    # Of a large message, products with the number of servers need 64 bits.
    numbers = tf.range(size + 1, dtype=tf.int64)
    ends = tf.cast(tf.cast(count, tf.int64) * numbers // size, tf.int32)
    return ends[1:] - ends[:-1]


def _served(
    communicator, flat, server, role, push_wire, pull_wire, update=tf.identity
):
    """The sum over a group, after each server has updated its part of it."""
    size = communicator.size
    splits = _splits(tf.size(flat), size, server)
    # All ranks know the splits: no message tells them.
    mine = splits[communicator.rank]
    route = Route(splits, tf.fill([size], mine), tf.reduce_max(splits))
    with tf.name_scope("push"):
        pushed = push_wire.carry(
            flat, communicator.all_to_all_along, route, name=f"{role}push"
        )
        total = tf.reduce_sum(tf.reshape(pushed, [size, mine]), axis=0)
    total = update(total)
    with tf.name_scope("pull"):
        return pull_wire.decode(
            communicator.all_to_all_back(
                tf.concat([pull_wire.encode(total)] * size, axis=0),
                route,
                name=f"{role}pull",
            )
        )
