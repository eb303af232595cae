"""The speed of this cluster, by a short probe."""

import dataclasses
import time

import numpy as np
import tensorflow as tf

_DIM = 16
_ROWS = (8, 20_000)  # of 64 bytes
_REPEATS = 5
_ROUNDS = 3
_IDLE_SECONDS = 0.05
_LEAST_SECONDS = 1e-6  # where waiting hides it


@dataclasses.dataclass(frozen=True)
class Speed:
    """Time as a linear function of bytes.

    Args:
        latency_seconds: Time of an empty message.
        seconds_per_byte: Per byte that the busiest machine moves.
    """

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, num_bytes):
        return self.latency_seconds + self.seconds_per_byte * num_bytes


def measure(communicator, num_bytes):
    """Times each path at two sizes. A collective call, between steps.

    Args:
        communicator: `Collectives` of all ranks.
        num_bytes: Function of a path's name ("allreduce", "ps", "allgather")
            and a number of rows of 16 float32: the bytes that the busiest
            machine moves for them. By "ps" each process asks each owner for
            that many rows.

    Returns:
        dict from a path's name to its `Speed` on the slowest rank, and from
        "update" to that of reading and writing a variable.
    """
    found = {}
    for name, run in _paths(communicator).items():
        seconds = [_seconds(communicator, run, rows) for rows in _ROWS]
        sizes = [num_bytes(name, rows) for rows in _ROWS]
        found[name] = _line(sizes, seconds)
    seconds = [_seconds(communicator, _update, rows) for rows in _ROWS]
    found["update"] = _line([rows * _DIM * 4 for rows in _ROWS], seconds)
    return found


def measure_link(communicator):
    """Times AllReduce at two sizes. A collective call, between steps.

    Args:
        communicator: `Collectives` of all ranks.

    Returns:
        `Speed` of a message on a link: seconds for each byte in one direction,
        and those of an empty message.
    """
    run = _paths(communicator)["allreduce"]
    others = communicator.size - 1
    seconds = [_seconds(communicator, run, rows) for rows in _ROWS]
    sizes = [2 * rows * _DIM * 4 * others / (others + 1) for rows in _ROWS]
    whole = _line(sizes, seconds)
    # A ring's messages follow each other.
    return Speed(whole.latency_seconds / (2 * others), whole.seconds_per_byte)


def message_seconds(communicator):
    """Processor time of a small message. A collective call, between steps.

    Args:
        communicator: `Collectives` of all ranks.

    Returns:
        Seconds where it is sent, and as many where it arrives.
    """
    found, idle = [], _idle_share()

    def broadcast(rows):
        communicator.broadcast([rows], root=0, name="speed/broadcast")

    def timed(several):
        begin, since = time.process_time(), time.perf_counter()
        several()
        waited = idle * (time.perf_counter() - since)
        found.append(time.process_time() - begin - waited)

    _rounds(communicator, broadcast, _ROWS[0], timed)
    times = communicator.gather_objects(
        max(_LEAST_SECONDS, float(np.median(found))) / _REPEATS,
        name="speed/message",
    )
    # Each rank but the first gets it once.
    return sum(times) / (2 * (communicator.size - 1))


def _idle_share():
    """The share of a processor that this process takes while it waits.

    Horovod's thread looks for messages a thousand times a second.
    """
    begin, since = time.process_time(), time.perf_counter()
    time.sleep(_IDLE_SECONDS)
    waited = time.perf_counter() - since
    return (time.process_time() - begin) / waited


def _line(sizes, seconds):
    rise = (seconds[1] - seconds[0]) / max(1, sizes[1] - sizes[0])
    return Speed(seconds[0], max(0.0, rise))


def _paths(communicator):
    size = communicator.size

    def all_reduce(rows):
        communicator.all_reduce([rows], name="speed/allreduce")

    def server(rows):
        splits = tf.fill([size], tf.shape(rows)[0])
        asked = tf.zeros([size * tf.shape(rows)[0]], tf.int64)
        received, route = communicator.all_to_all(
            asked, splits, name="speed/ids"
        )
        count = tf.shape(received)[0]
        pulled = communicator.all_to_all_back(
            tf.zeros([count, _DIM]), route, name="speed/pull"
        )
        communicator.all_to_all_along(pulled, route, name="speed/push")

    def all_gather(rows):
        counts = communicator.all_gather(
            tf.shape(rows)[:1],
            name="speed/counts",
            counts=tf.ones([size], tf.int32),
        )
        communicator.all_gather(rows, name="speed/allgather", counts=counts)

    return {"allreduce": all_reduce, "ps": server, "allgather": all_gather}


def _seconds(communicator, run, num_rows):
    """Seconds of one run: the slowest rank's median over some rounds."""
    rounds = []

    def timed(several):
        begin = time.perf_counter()
        several()
        rounds.append((time.perf_counter() - begin) / _REPEATS)

    _rounds(communicator, run, num_rows, timed)
    medians = communicator.gather_objects(
        float(np.median(rounds)), name="speed/seconds"
    )
    return max(medians)


def _rounds(communicator, run, num_rows, timed):
    """Calls `timed` some times, with a function of `_REPEATS` runs."""
    rows = tf.Variable(tf.ones([num_rows, _DIM]))

    @tf.function
    def several():
        for _ in tf.range(_REPEATS):
            run(rows)

    several()  # traces
    for _ in range(_ROUNDS):
        communicator.barrier(name="speed/begin")
        timed(several)


def _update(rows):
    rows.assign_sub(rows * 0.1)
