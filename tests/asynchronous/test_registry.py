"""Ranks that are lost, and those that take part again."""

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf.tf_sessions import function_of
from keras_sparsity.asynchronous.batches import LOST, NONE, Batches, record
from keras_sparsity.asynchronous.cluster import Cluster
from keras_sparsity.asynchronous.registry import MeetingCells, Registry
from keras_sparsity.machines import ports

# One process is all servers, and that of rank 2 has the facts.
_NUM_WORKERS, _SERVER = 2, 0


class _Alone(Cluster):
    """Of one process, which is two workers and a server."""

    def __init__(self):
        with ports.reserved(1) as (port,):
            super().__init__(
                [("127.0.0.1", port)], 0, 1, 0, False, lambda message: None
            )
        self.num_workers, self.size = _NUM_WORKERS, 3


@pytest.fixture(scope="module")
def cluster():
    return _Alone()


def _taking(cluster, name, rank):
    """A function by which a worker takes a batch."""
    with tf.Graph().as_default() as graph:
        device = cluster.device(_SERVER)
        batches = Batches(device, _NUM_WORKERS, rank, f"{name}/batches")
        take = function_of(cluster.session(graph), *batches.take())
    return lambda: int(take(record(NONE))[0])


def _asking(cluster, rank):
    """A function by which a new process asks to join a `fit`."""
    with tf.Graph().as_default() as graph:
        cells = MeetingCells(cluster)
        fit = tf.compat.v1.placeholder(tf.int64, [])
        asks = cells.asks.set(rank, fit)
        seen = [cells.lost.read(), cells.epochs.read(), cells.numbers.read()]
        session = cluster.session(graph)
        ask = function_of(session, [fit], [], [asks])
        return ask, function_of(session, [], seen)


def test_a_lost_worker_takes_no_batch_until_it_has_joined(cluster):
    registry = Registry(cluster)
    registry.begin_meeting()
    registry.add("first", [_SERVER], None)
    takes = [_taking(cluster, "first", rank) for rank in range(2)]
    assert [take() for take in takes] == [0, 1]
    registry.change(1, is_lost=True)
    assert takes[1]() == LOST
    assert takes[0]() == 1  # which was the other's
    # Also in what begins after the loss.
    registry.add("second", [_SERVER], 3)
    assert _taking(cluster, "second", 1)() == LOST
    ask, see = _asking(cluster, 1)
    ask(7)
    for fit, is_lost in ((6, True), (7, False)):
        registry.begin_epoch("second", fit, 4)
        lost, epochs, numbers = see()
        assert list(lost) == [False, is_lost, False]
        assert (epochs[1] == 4) != is_lost
        taken = _taking(cluster, "second", 1)()
        assert (taken == LOST) == is_lost
    # It waits for the letter that the others have read last.
    np.testing.assert_array_equal(numbers, [0, -1, 0])
    for name in ("first", "second"):
        registry.remove(name)


def test_nobody_joins_in_the_first_epoch(cluster):
    registry = Registry(cluster)
    registry.begin_meeting()
    registry.add("first epoch", [_SERVER], None)
    registry.change(1, is_lost=True)
    ask, see = _asking(cluster, 1)
    ask(7)
    registry.begin_epoch("first epoch", 7, None)
    lost, *_ = see()
    assert list(lost) == [False, True, False]
    registry.remove("first epoch")


def test_servers_return_while_it_is_allowed(cluster):
    registry = Registry(cluster)
    assert not registry.returning.lose(_SERVER)
    registry.begin_returns()
    assert registry.returning.lose(_SERVER)
    assert not registry.end_returns()
    registry.returning.take(_SERVER)
    assert registry.end_returns()
    assert not registry.returning.lose(_SERVER)
