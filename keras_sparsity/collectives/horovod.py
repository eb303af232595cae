"""The engine on Horovod, which needs to be compiled (see the README).

Horovod's operations are not stateful: TensorFlow may fold one whose input is
constant, merge equal ones, and drop one whose result is unused. If that happens
on one rank only, the others wait. `_unfolded` prevents the first two (each call
has a read of its own, after its own entry in the journal), `_keep` the third.
"""

import functools
import os
import re
import socket

import tensorflow as tf

from keras_sparsity._tf import tf_graphs
from keras_sparsity.collectives import devices
from keras_sparsity.collectives.engine import Engine, Route
from keras_sparsity.collectives.local import LocalEngine
from keras_sparsity.collectives.wire import wires
from keras_sparsity.health import arrival, meter
from keras_sparsity.machines import addresses, settings, topology

try:
    import horovod.tensorflow as hvd
except ImportError as error:
    raise ImportError(
        "The horovod engine needs Horovod, compiled against the installed "
        f"TensorFlow: {settings.INSTALL_HOROVOD}, or use "
        'engine="native", which needs TensorFlow only.'
    ) from error

_MOVED = "bool int8 uint8 int16 uint16 int32 int64 float16 float32 float64"
_MOVE_BITCASTS = {"bfloat16": "uint16", "uint32": "int32"}
_MOVE_BITCASTS |= dict.fromkeys(("uint64", "complex64"), "int64")
_REDUCED = "int32 int64 float16 float32 float64"
_REDUCE_CASTS = dict.fromkeys("bool int8 uint8 int16 uint16".split(), "int32")
_REDUCE_CASTS |= {"uint32": "int64", "bfloat16": "float32"}
_REDUCE_OPS = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}


def bring_up():
    """Starts Horovod.

    Returns:
        `(engine of all processes, name of this process's machine)`.
    """
    # Horovod fuses messages that are ready at the same time, so the order of
    # a sum would differ from step to step. `Calls` fuses already.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    # Gloo ends all processes when one is silent for 30 s. The watch of
    # `health` decides how long to wait instead, and gives the reason.
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(24 * 3600))
    _check_rendezvous()
    _choose_interface()
    hvd.init(process_sets="dynamic" if _may_need_groups() else None)
    place = topology.override(hvd.rank(), hvd.size())
    if place is not None:
        machine, local_rank = place.cross_rank, place.local_rank
        local_size = place.local_size
    else:
        machine, local_rank = _machine(), hvd.local_rank()
        local_size = hvd.local_size()
    devices.pin_gpu(local_rank, local_size)
    return HorovodEngine(range(hvd.size()), hvd.global_process_set), machine


def _rendezvous():
    """The address of Gloo's rendezvous, without "http://"; None under MPI.

    The address of `keras-sparsity run` contains a secret, and Horovod appends
    the port to it.
    """
    host, port = (
        os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{part}")
        for part in ("ADDR", "PORT")
    )
    return f"{host}:{port}" if host and port else None


def _check_rendezvous():
    # Without an answer Horovod aborts the process and names no address.
    if _rendezvous() is None:
        return
    address = _rendezvous().partition("/")[0]
    problems = arrival.unreachable({"Horovod's rendezvous": address})
    if problems:
        raise RuntimeError(
            f"{problems[0]}. The launcher (`keras-sparsity run`, "
            "`horovodrun`) serves it while the ranks run: it has ended, or its "
            "machine cannot be reached from here."
        )


def _choose_interface():
    """Has Gloo listen where the launcher reaches this machine.

    By default it takes the address of the machine's name, which on Debian is
    one of loopback.
    """
    own = [a for a in addresses.towards_launcher() if not a.startswith("127.")]
    name = addresses.interface(own[0]) if _rendezvous() and own else None
    if name is not None:
        os.environ.setdefault("HOROVOD_GLOO_IFACE", name)


def others():
    """dict from each process's name to its entry at the rendezvous."""
    settings.check_horovod()
    address = _rendezvous()
    if address is None:
        return {}
    return {
        f"rank {rank}": f"http://{address}/global/{rank}"
        for rank in range(int(os.environ.get("HOROVOD_SIZE", 0)))
    }


def _may_need_groups():
    """Whether there may be groups other than all processes and single ones.

    Process sets add idle traffic between Horovod's controllers. All ranks
    give the same answer here, whatever their machine's number of processes.
    """
    size, local_size, cross_size = (
        os.environ.get(f"HOROVOD_{name}")
        for name in ("SIZE", "LOCAL_SIZE", "CROSS_SIZE")
    )
    place = topology.override(0, 1)
    if place is not None:
        local_size, cross_size = str(place.local_size), str(place.cross_size)
    return size is None or size not in (local_size, cross_size)


def _machine():
    if hvd.is_homogeneous():
        return hvd.cross_rank()
    return os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()


_process_sets = {}  # from a tuple of ranks


def _process_set(ranks):
    """Horovod's object for some ranks; it takes each set of ranks once."""
    if ranks in _process_sets:
        return _process_sets[ranks]
    try:
        made = _process_sets[ranks] = hvd.add_process_set(list(ranks))
        return made
    except ValueError as error:
        raise ValueError(
            "Horovod was started without groups of ranks. Received: "
            f"{list(ranks)}. Start all ranks with the environment variable "
            "HOROVOD_DYNAMIC_PROCESS_SETS=1, which adds some traffic between "
            "ranks that wait, or use the native engine."
        ) from error


class HorovodEngine(Engine):
    """Horovod's operations among the processes of one process set.

    Args:
        ranks: The members.
        process_set: Horovod's object for them.
    """

    name = "horovod"
    reduce_wire = wires(_REDUCED.split(), _REDUCE_CASTS)
    move_wire = wires(_MOVED.split(), bitcasts=_MOVE_BITCASTS)

    def __init__(self, ranks, process_set):
        self._ranks = list(ranks)
        self._process_set = process_set
        self.rank = self._ranks.index(hvd.rank())
        self.size = len(self._ranks)
        self._functions = {}
        self._sinks = {}

    def all_reduce(self, flat, op, name):
        meter.count_ring(flat, self.size)
        return self._run(
            lambda flat, **call: hvd.allreduce(
                flat, op=_REDUCE_OPS[op], **call
            ),
            name,
            flat,
        )

    def all_to_all(self, rows, splits, name):
        received, received_splits = self._run(hvd.alltoall, name, rows, splits)
        self._count(rows, splits, received_splits)
        no_bound = tf.zeros([], tf.int32)
        return received, Route(splits, received_splits, no_bound)

    def all_to_all_along(self, rows, route, name):
        self._count(rows, route.splits, route.received_splits)
        return self._run(hvd.alltoall, name, rows, route.splits)[0]

    def all_gather(self, rows, name, counts=None):
        del counts  # Horovod exchanges them by itself
        gathered = self._run(hvd.allgather, name, rows)
        meter.count(
            lambda: [
                tf.size(rows) * (self.size - 1),
                tf.size(gathered) - tf.size(rows),
            ],
            rows.dtype,
        )
        return gathered

    def broadcast(self, flat, root, name):
        root = self._ranks[root]
        return self._run(
            lambda flat, **call: hvd.broadcast(flat, root, **call), name, flat
        )

    def split(self, groups, label):
        # All ranks must add each set, in the same order.
        sets = [
            (ranks, _process_set(tuple(ranks)))
            for ranks in groups
            if len(ranks) > 1
        ]
        for ranks, process_set in sets:
            if self._ranks[self.rank] in ranks:
                return HorovodEngine(ranks, process_set)
        return LocalEngine(self.name)

    def end_groups(self):
        # With more than one process set, Horovod aborts a process whose
        # connection to another one has ended.
        for process_set in _process_sets.values():
            hvd.remove_process_set(process_set)
        _process_sets.clear()

    def abort(self, message):
        hvd.shutdown()

    def close(self):
        hvd.shutdown()

    def _count(self, rows, splits, received_splits):
        def elements():
            width = tf.reduce_prod(tf.shape(rows)[1:])
            return [
                (tf.reduce_sum(counts) - counts[self.rank]) * width
                for counts in (splits, received_splits)
            ]

        meter.count(elements, rows.dtype)

    def _run(self, operation, name, tensor, *splits):
        if self._process_set.process_set_id is None:
            raise RuntimeError(
                "A group of Horovod's ranks sends no messages behind "
                "asynchronous training with a bound, which has ended all "
                f"groups. Received: {name!r} among ranks {self._ranks}. Train "
                "synchronously first, or use the native engine."
            )
        call = {
            "name": _operation_name(name),
            "ignore_name_scope": True,
            "process_set": self._process_set,
        }
        if not tf.executing_eagerly():
            outputs = operation(_unfolded(tensor), *splits, **call)
            self._keep(outputs, name)
            return outputs
        # Eager operations have no names, so Horovod would match any two.
        specs = [tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)]
        specs += [tf.TensorSpec(part.shape, part.dtype) for part in splits]
        key = (name, *specs)
        if key not in self._functions:
            function = tf.function(
                lambda *tensors: operation(*tensors, **call), autograph=False
            )
            self._functions[key] = function.get_concrete_function(*specs)
        return self._functions[key](tensor, *splits)

    def _keep(self, outputs, name):
        """Lets an operation run even if nothing uses its outputs.

        Grappler removes operations without side effects, as Horovod's count,
        if their outputs only control others. So a variable takes an element:
        one variable per name, as TensorFlow orders the uses of a variable.
        """
        flat = tf.reshape(tf.nest.flatten(outputs)[0], [-1])
        # A copy: a slice would keep the whole buffer.
        element = tf.concat([flat[:1], flat[:1]], 0)
        key = (name, element.dtype)
        if key not in self._sinks:
            with tf.init_scope(), tf.device("CPU:0"):
                self._sinks[key] = tf.raw_ops.VarHandleOp(
                    dtype=element.dtype,
                    shape=tf.TensorShape(None),
                    shared_name=f"keras_sparsity/sink/{name}",
                )
        tf.raw_ops.AssignVariableOp(
            resource=tf_graphs.captured(self._sinks[key]), value=element
        )


def _operation_name(name):
    """`name` as TensorFlow allows it; "/" would begin a name scope."""
    name = name.replace("/", ".").replace("#", "-")
    return "hvd." + re.sub(
        "[^A-Za-z0-9.-]", lambda match: f"_{ord(match.group())}_", name
    )


def _unfolded(tensor):
    """`tensor`, which TensorFlow cannot recognize as constant.

    It is a slice of the whole tensor, without a copy, from a position that is
    known at run time only. (Grappler sees through a reshape to its own shape.)
    """
    zero = tf.raw_ops.ReadVariableOp(
        resource=tf_graphs.captured(_zero()), dtype=tf.int32
    )
    begin = tf.fill([tensor.shape.rank], zero)
    unfolded = tf.slice(tensor, begin, tf.shape(tensor))
    unfolded.set_shape(tensor.shape)
    return unfolded


@functools.cache
def _zero():
    with tf.init_scope(), tf.device("CPU:0"):
        handle = tf.raw_ops.VarHandleOp(
            dtype=tf.int32, shape=[], shared_name="keras_sparsity/zero"
        )
        tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant(0))
    return handle
