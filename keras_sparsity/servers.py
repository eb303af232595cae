"""Dense gradients by way of servers, as in the paper's baselines."""

import tensorflow as tf

from keras_sparsity import architectures
from keras_sparsity.collectives.engine import Route
from keras_sparsity.collectives.wire import Wire
from keras_sparsity.tables.exchange import way_of
from keras_sparsity.tables.ways import ThroughMachines

# What the roles of its calls begin with.
ROLE = "optimizer/servers/"


def summed(communicator, gradients, in_one_message=True, role=ROLE):
    """The sum over the ranks of each gradient, by way of its servers.

    Each process is a server, too. What a parameter server and its workers
    send each other in a step are the gradient, and the variable that it has
    updated. Here the server sends the sum back, which is as long, and each
    rank updates its own copy: nothing else in the step depends on who does.
    Where a machine's processes aggregate locally, they add theirs up before
    it is pushed, and pull the sum once: it crosses the network once for each
    machine, and not once for each process.

    Args:
        communicator: `Collectives` of all ranks.
        gradients: list of dense tensors, of the same shapes on all ranks.
        role: what the names of its messages begin with.
        in_one_message: those of one dtype travel together, in as many even
            partitions as there are servers. Else each travels by itself, to
            one server, which takes turns with the others. The native engine
            pads this to `size` times the gradient.

    Returns:
        List of tensors.

    References:
        EuroSys 3.1 (parameter server, of dense variables), 4.3 (local
        aggregation), Table 4 (naive and optimized PS).
    """
    results = [None] * len(gradients)
    if in_one_message:
        of_dtypes = {}
        for index, gradient in enumerate(gradients):
            of_dtypes.setdefault(gradient.dtype, []).append(index)
        messages = [(indices, None) for indices in of_dtypes.values()]
    else:
        messages = [([index], index) for index in range(len(gradients))]
    for indices, server in messages:
        flat = [tf.reshape(gradients[i], [-1]) for i in indices]
        of_message = role if server is None else f"{role}{server}/"
        total = _summed(
            communicator, tf.concat(flat, axis=0), server, of_message
        )
        parts = tf.split(total, [tf.size(part) for part in flat])
        for index, part in zip(indices, parts, strict=True):
            shape = tf.shape(gradients[index])
            results[index] = tf.ensure_shape(
                tf.reshape(part, shape), gradients[index].shape
            )
    return results


def _summed(communicator, flat, server, role):
    """The sum of a flat tensor, at one server, or at all in even parts."""
    wire = architectures.wire(flat.dtype)
    if server is not None or way_of(communicator) is not ThroughMachines:
        return _served(communicator, flat, server, role, wire, wire)
    # Each of a machine's processes has a part, of the same length as those of
    # the same local rank elsewhere.
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


def _served(
    communicator, flat, server, role, push_wire, pull_wire, update=tf.identity
):
    """The sum over some processes, and what a server makes of its part."""
    size = communicator.size
    count = tf.size(flat)
    if server is None:
        ends = count * tf.range(1, size + 1) // size
        splits = ends - tf.concat([[0], ends[:-1]], axis=0)
    else:
        splits = count * tf.one_hot(server % size, size, dtype=tf.int32)
    # All ranks know it: nothing is asked.
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
