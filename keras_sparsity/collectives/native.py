"""The engine on TensorFlow's own collectives, which needs nothing else.

These operations take equal parts only, and one shape per instance key. Uneven
parts are padded to a capacity that all ranks compute from the same counts, and
the capacity is part of the key.
"""

import errno
import hashlib
import itertools
import logging
import signal
import threading

import numpy as np
import tensorflow as tf

from keras_sparsity._tf import tf_context, tf_graphs
from keras_sparsity.collectives import devices
from keras_sparsity.collectives.engine import Engine, Route
from keras_sparsity.collectives.local import LocalEngine
from keras_sparsity.collectives.wire import wires
from keras_sparsity.health import meter
from keras_sparsity.machines import firewall, settings, topology
from keras_sparsity.machines.capacities import CAPACITIES

_CARRIED = "float16 float32 float64 int32 int64".split()
# The operations that only move tensors copy bytes: 16 bits are 16 bits.
_MOVE_BITCASTS = dict.fromkeys(("bfloat16", "int16", "uint16"), "float16")
_MOVE_BITCASTS |= {"uint32": "int32", "uint64": "int64", "complex64": "int64"}
_MOVE_CASTS = dict.fromkeys(("bool", "int8", "uint8"), "int32")
_REDUCE_CASTS = _MOVE_CASTS | {
    "int16": "int32",
    "uint16": "int32",
    "uint32": "int64",
}
_MERGE_OPS = {"sum": "Add", "max": "Max", "min": "Min"}

# TensorFlow ends all processes when one is silent for 10 s. The watch of
# `health` decides how long to wait instead, and gives the reason.
_NEVER_SECONDS = 24 * 3600

_KEYS = 2**31
# Odd, so that multiplying by it permutes the keys (Knuth's multiplier).
_SPREAD = 2654435761 % _KEYS

_CAPACITY_KEYS = (CAPACITIES % _KEYS * _SPREAD % _KEYS).astype(np.int32)


def bring_up():
    """Starts TensorFlow's collective runtime from TF_CONFIG, or by Slurm.

    Returns:
        `(engine of all processes, name of this process's machine)`.
    """
    addresses, rank = _read_cluster()
    hosts = [address.rpartition(":")[0] for address in addresses]
    if len(hosts) == 1:
        return LocalEngine("native"), hosts[rank]
    place = topology.override(rank, len(hosts))
    machine = hosts[rank] if place is None else place.cross_rank
    place = place or topology.topologies(hosts)[rank]
    devices.pin_gpu(place.local_rank, place.local_size)
    address = addresses[rank]
    guarded = firewall.guarded_port(
        int(address.rpartition(":")[2]),
        [host.strip("[]") for host in hosts],
        # One warning for each machine.
        logging.info if place.local_rank else logging.warning,
    )
    try:
        with guarded:
            _start_runtime(addresses, rank)
            _take_back_sigterm()
    except (OSError, tf.errors.UnknownError) as error:
        is_in_use = getattr(error, "errno", None) == errno.EADDRINUSE
        if not is_in_use and "start gRPC server" not in str(error):
            raise
        raise RuntimeError(
            f"Rank {rank} cannot listen at {address}, its address by "
            "TF_CONFIG or Slurm: the port is in use on this machine, by "
            "another program or by an earlier run that has not ended. End "
            "that, or choose another port for the rank in all ranks' TF_CONFIG."
        ) from error
    return NativeEngine(rank, len(hosts), "all", 0), machine


def _take_back_sigterm():
    """Has SIGTERM end this process, or do what the program has set.

    TensorFlow's collectives catch it and go on (seen on 2.18 and 2.21).
    """
    if threading.current_thread() is threading.main_thread():
        before = signal.getsignal(signal.SIGTERM)
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _start_runtime(addresses, rank):
    # TensorFlow's strategy knows no Slurm, and takes no servers for members.
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": addresses}),
        task_type="worker",
        task_id=rank,
        rpc_layer="grpc",
    )
    try:
        with tf_context.heartbeats_may_be_missed(_NEVER_SECONDS):
            # The public way to start the runtime, which outlives this object.
            tf.distribute.MultiWorkerMirroredStrategy(resolver)
    except RuntimeError as error:
        if "program startup" not in str(error):
            raise
        raise RuntimeError(
            "The native engine must start before TensorFlow runs its first "
            "operation, and one has run already: a tensor, a dataset, a "
            "model or an optimizer was made. Start the script with "
            "`keras-sparsity run`, which does it before the first line, or "
            "move the construction of the strategy to the top of the script."
        ) from error


def others():
    """dict from the other processes' names to their addresses."""
    addresses, own = _read_cluster()
    return {
        f"rank {rank}": address
        for rank, address in enumerate(addresses)
        if rank != own
    }


def _read_cluster():
    """`(address of each rank, own rank)`."""
    tasks = settings.cluster()
    if not tasks:
        return ["localhost:0"], 0
    return [address for *_, address in tasks], settings.cluster_rank(tasks)


class NativeEngine(Engine):
    """TensorFlow's collectives among the processes of one group.

    Args:
        rank, size: This process in the group.
        label: The group's name.
        number: The group's index among those of that name.
    """

    name = "native"
    pads = True
    reduce_wire = wires([*_CARRIED, "bfloat16"], _REDUCE_CASTS)
    move_wire = wires(_CARRIED, _MOVE_CASTS, _MOVE_BITCASTS)

    def __init__(self, rank, size, label, number):
        self.rank = rank
        self.size = size
        self._group_key = (_hash(f"group {label}") + number) % _KEYS
        self._names = {}
        self._tokens = {}
        # TensorFlow orders the members by their task's name: 10 before 2.
        order = self._gather(tf.constant([rank]), "order").numpy()
        self._order = None if (np.diff(order) > 0).all() else order

    def all_reduce(self, flat, op, name):
        meter.count_ring(flat, self.size)
        return tf.raw_ops.CollectiveReduceV2(
            input=flat,
            merge_op=_MERGE_OPS[op],
            final_op="Id",
            **self._instance(name, _length_key(flat)),
        )

    def all_to_all(self, rows, splits, name):
        counts = self._gather(splits, f"{name}/counts")
        counts = self._by_rank(tf.reshape(counts, [self.size, self.size]))
        route = Route(splits, counts[:, self.rank], tf.reduce_max(counts))
        return self.all_to_all_along(rows, route, name), route

    def all_to_all_along(self, rows, route, name):
        width = _width(rows)
        capacity, capacity_key = _capacity(route.largest, width)
        meter.count(lambda: [capacity * (self.size - 1)] * 2, rows.dtype)
        message = _padded(rows, route.splits, width, capacity, self.size)
        arrived = tf.raw_ops.CollectiveAllToAllV2(
            input=self._by_task(message), **self._instance(name, capacity_key)
        )
        arrived = self._by_rank(arrived)
        return _unpadded(arrived, route.received_splits, width, self.size, rows)

    def all_gather(self, rows, name, counts=None):
        if counts is None:
            # Flat: their length, not another shape, is part of the key.
            shapes = self._gather(tf.shape(rows), f"{name}/counts")
            shapes = self._by_rank(tf.reshape(shapes, [self.size, -1]))
            shapes = tf.ensure_shape(shapes, [self.size, rows.shape.rank])
            rows, counts = _of_one_shape(rows, shapes)
        width = _width(rows)
        capacity, capacity_key = _capacity(tf.reduce_max(counts), width)
        message = _padded(rows, tf.shape(rows)[:1], width, capacity, 1)
        arrived = self._gather(message, name, capacity_key)
        return _unpadded(self._by_rank(arrived), counts, width, self.size, rows)

    def broadcast(self, flat, root, name):
        instance = self._instance(name, _length_key(flat))
        instance.pop("ordering_token")
        if self.rank == root:
            return tf.raw_ops.CollectiveBcastSendV2(input=flat, **instance)
        return tf.raw_ops.CollectiveBcastRecvV2(
            T=flat.dtype, shape=tf.shape(flat), **instance
        )

    def split(self, groups, label):
        number = [self.rank in ranks for ranks in groups].index(True)
        ranks = groups[number]
        if len(ranks) == 1:
            return LocalEngine(self.name)
        return NativeEngine(ranks.index(self.rank), len(ranks), label, number)

    def abort(self, message):
        tf_context.abort_collectives(message)

    def close(self):
        pass

    def _gather(self, tensor, name, length_key=None):
        if length_key is None:
            length_key = _length_key(tensor)
        meter.count(
            lambda: [tf.size(tensor, tf.int64) * (self.size - 1)] * 2,
            tensor.dtype,
        )
        return tf.raw_ops.CollectiveGatherV2(
            input=tensor, **self._instance(name, length_key)
        )

    def _by_rank(self, parts):
        """Parts in TensorFlow's order of tasks, in the order of ranks."""
        if self._order is None:
            return parts
        return tf.gather(parts, np.argsort(self._order))

    def _by_task(self, parts):
        return parts if self._order is None else tf.gather(parts, self._order)

    def _instance(self, name, length_key):
        """The arguments that identify a collective."""
        name_key = self._name_key(name)
        if isinstance(length_key, int):
            key = tf.constant(name_key ^ length_key)
        else:
            key = tf.bitwise.bitwise_xor(length_key, name_key)
        return {
            "group_size": self.size,
            "group_key": self._group_key,
            "instance_key": key,
            "ordering_token": self._token(name),
        }

    def _name_key(self, name):
        """A number for `name`, the same on all ranks.

        TensorFlow compares the lengths of messages, so it notices two names
        with one key by chance if their lengths differ. Otherwise it would
        confuse them, so one key for two names is an error here.
        """
        key = _hash(name)
        known = self._names.setdefault(key, name)
        if known != name:
            raise ValueError(
                f"The collectives {known!r} and {name!r} have the same key, "
                f"{key}. Give the layer or table another name."
            )
        return key

    def _token(self, name):
        """A resource for this name, which orders its uses in a function.

        Without one, TensorFlow runs all collectives of a function one after
        the other.
        """
        if tf.executing_eagerly():
            return []
        if name not in self._tokens:
            with tf.init_scope(), tf.device("CPU:0"):
                self._tokens[name] = tf.raw_ops.VarHandleOp(
                    dtype=tf.int32,
                    shape=[],
                    shared_name=f"keras_sparsity/{self._group_key}/{name}",
                )
        return [tf_graphs.captured(self._tokens[name])]


def _hash(text):
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % _KEYS


def _spread(length):
    """The key of a length, an integer or an integer tensor."""
    return length % _KEYS * _SPREAD % _KEYS


def _length_key(flat):
    """The key of a flat tensor's length: an integer if that is known."""
    if flat.shape[0] is not None:
        return _spread(flat.shape[0])
    return tf.cast(_spread(tf.size(flat, tf.int64)), tf.int32)


def _width(rows):
    """The number of elements of a row: an integer if that is known."""
    width = rows.shape[1:].num_elements()
    if width is None:
        return tf.reduce_prod(tf.shape(rows, tf.int64)[1:])
    return width


def _of_one_shape(rows, shapes):
    """Rows, and each rank's number of them; an error of unequal rows.

    Ranks would wait for each other: the length of a message is in its key. A
    rank without rows takes over the others' shape.
    """
    counts, row_shape = shapes[:, 0], shapes[tf.argmax(shapes[:, 0]), 1:]
    is_like = tf.reduce_all(shapes[:, 1:] == row_shape, 1)
    alike = tf.debugging.Assert(
        tf.reduce_all(is_like | (counts == 0)),
        [
            "All ranks' rows must have one shape, so that they become one "
            "tensor. Received tensors of these shapes, by rank:",
            shapes,
            "Pad them to a size that does not depend on a rank's part of the "
            "batch, as TextVectorization(output_sequence_length=...) does.",
        ],
        summarize=-1,
    )
    with tf.control_dependencies([alike] if alike is not None else []):
        counts = tf.identity(counts)
        if not rows.shape[1:].is_fully_defined():
            rows = tf.reshape(
                rows, tf.concat([tf.shape(rows)[:1], row_shape], 0)
            )
    return rows, counts


def _capacity(largest, width):
    """`(padded length of parts of up to `largest` rows, its key)`."""
    largest = tf.cast(largest, tf.int64) * width
    # As tf.searchsorted, which takes 30 operations.
    bucket = tf.raw_ops.LowerBound(
        sorted_inputs=CAPACITIES[np.newaxis],
        values=tf.reshape(largest, [1, 1]),
    )
    bucket = tf.reshape(bucket, [])
    return tf.gather(CAPACITIES, bucket), tf.gather(_CAPACITY_KEYS, bucket)


def _padded(rows, counts, width, capacity, num_parts):
    """`(num_parts, capacity)`: `counts[i]` rows in each line, then zeros."""
    lengths = tf.cast(counts, tf.int64) * width
    gaps = capacity - lengths
    parts = tf.split(tf.reshape(rows, [-1]), lengths, num=num_parts)
    zeros = tf.zeros([tf.reduce_sum(gaps)], rows.dtype)
    zeros = tf.split(zeros, gaps, num=num_parts)
    pieces = itertools.chain(*zip(parts, zeros, strict=True))
    return tf.reshape(tf.concat(list(pieces), 0), [num_parts, capacity])


def _unpadded(padded, counts, width, num_parts, rows):
    """The first `counts[i]` rows of each line, shaped as those of `rows`."""
    capacity = tf.shape(padded, tf.int64)[1]
    lengths = tf.cast(counts, tf.int64) * width
    pieces = tf.reshape(tf.stack([lengths, capacity - lengths], 1), [-1])
    pieces = tf.split(tf.reshape(padded, [-1]), pieces, num=2 * num_parts)
    if isinstance(width, int) and width > 0:
        shape = [-1, *rows.shape[1:]]
    else:
        shape = tf.concat([[tf.reduce_sum(counts)], tf.shape(rows)[1:]], 0)
    return tf.reshape(tf.concat(pieces[::2], 0), shape)
