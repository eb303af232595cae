"""The speed of this cluster, by a short probe."""

import dataclasses
import time

import numpy as np
import tensorflow as tf

_DIM = 16
_ROWS = (8, 20_000)  # of 64 bytes
_NUM_PARTS = 4
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


def measure_messages(communicator, num_sharing):
    """Times AllReduce and a broadcast. A collective call, between steps.

    A ring has 2 (S-1) hops, but its processor time is counted as that of one
    message sent and one received: of 4 ranks with 6 hops it was 2 ms each, that
    of a broadcast 0.5 ms at each end. Links have what processors leave of a
    sum's time.

    Args:
        num_sharing: the number of processes that share a processor.

    Returns:
        `(Speed of a link, Speed of a processor)`: of a message in one
        direction; of its sender, and of its receiver.
    """

    def broadcast(rows):
        communicator.broadcast([rows], root=0, name="speed/broadcast")

    def all_reduce(rows):
        # As of several gradients, which are packed.
        parts = tf.split(rows, _NUM_PARTS)
        communicator.all_reduce(parts, name="speed/allreduce")

    others = communicator.size - 1
    sent = [2 * rows * _DIM * 4 * others / (others + 1) for rows in _ROWS]
    idle = idle_share()
    whole, works = zip(
        *(_both_seconds(communicator, all_reduce, n, idle) for n in _ROWS),
        strict=True,
    )
    _, works_once = _both_seconds(communicator, broadcast, _ROWS[0], idle)
    # All that a rank sends another one receives; of a broadcast, each but the
    # first one message.
    processor = Speed(
        max(_LEAST_SECONDS, works_once * (others + 1) / (2 * others)),
        _line(sent, works).seconds_per_byte / 2,
    )
    return _divided(_line(sent, whole), processor, num_sharing, others)


def _divided(whole, processor, num_sharing, others):
    """`(Speed of a link, Speed of a processor)`, by sums in a ring.

    Together they take as long as a sum: processes that share several
    processors work at once, and so for less than their own times.

    Args:
        whole: `Speed` of a sum, by the bytes that each rank sends.
        processor: `Speed` of a message's sender, and of its receiver, by
            their processor times.
        num_sharing: as for `measure_messages`.
        others: the number of ranks less one.
    """
    ends = 2 * num_sharing
    processor = Speed(
        min(processor.latency_seconds, whole.latency_seconds / ends),
        min(processor.seconds_per_byte, whole.seconds_per_byte / ends),
    )
    latency = whole.latency_seconds - ends * processor.latency_seconds
    per_byte = whole.seconds_per_byte - ends * processor.seconds_per_byte
    return Speed(latency / (2 * others), per_byte), processor


def idle_share():
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
    return _both_seconds(communicator, run, num_rows)[0]


def _both_seconds(communicator, run, num_rows, idle=0.0):
    """`(seconds of one run, processor time of a rank)`.

    The median over some rounds: of the slowest rank, and the mean of all.

    Args:
        idle: as `idle_share` returns it.
    """
    rows = tf.Variable(tf.ones([num_rows, _DIM]))
    rounds = []

    @tf.function
    def several():
        for _ in tf.range(_REPEATS):
            run(rows)

    several()  # traces
    for _ in range(_ROUNDS):
        communicator.barrier(name="speed/begin")
        worked, begin = time.process_time(), time.perf_counter()
        several()
        seconds = time.perf_counter() - begin
        worked = time.process_time() - worked - idle * seconds
        rounds.append((seconds / _REPEATS, worked / _REPEATS))
    medians = communicator.gather_objects(
        np.median(rounds, axis=0), name="speed/seconds"
    )
    return float(np.max(medians, axis=0)[0]), float(np.mean(medians, axis=0)[1])


def _update(rows):
    rows.assign_sub(rows * 0.1)
