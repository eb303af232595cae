"""Updates at one server."""

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf.tf_sessions import function_of
from keras_sparsity.asynchronous.batches import LOST
from keras_sparsity.asynchronous.cells import Cell
from keras_sparsity.asynchronous.server_state import ServerState


class _Server:
    """A server with one weight, to which pushes of two workers add.

    Attributes:
        feeds, count: of a push of worker 0.
    """

    def __init__(self, session, name, count):
        self._session = session
        with tf.device("/cpu:0"):
            weight = Cell(f"{name}/weight", tf.float32, [])

        def update(gradients, *facts):
            return [weight.assign(weight.read() + gradients[0])]

        self.state = ServerState("/cpu:0", 2, 0, name, update)
        gradient = tf.compat.v1.placeholder(tf.float32, [])
        feeds, self.count = self.state.push([gradient])
        self.feeds = [*feeds, gradient]
        begun = [weight.fill(1.0), self.state.create, self.state.reset]
        session.run([*begun, self.state.set_count(np.int64(count))])
        self._push = function_of(session, self.feeds, [self.count])
        self._weight = function_of(session, [], [weight.read()])
        rank = tf.compat.v1.placeholder(tf.int64, [])
        left_out = [self.state.leave_out(rank)]
        self.leave_out = function_of(session, [rank], left_out)

    def take_place(self, ended, last, lost):
        """In an epoch that began with 5 updates."""
        told = np.int64(5), np.int64(ended), np.array(last, np.int64), lost
        self._session.run(self.state.take_place(*told))

    def push(self, batch):
        """The count before, and the weight then."""
        (before,) = self._push([batch, 0], 1.0, 0.5)
        return int(before), float(self._weight()[0])


@pytest.fixture
def session():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        yield session


def test_a_batch_is_applied_once(session):
    server = _Server(session, "once", 7)
    assert server.push(3) == (7, 1.5)
    assert server.push(3) == (8, 1.5)
    assert server.push(4) == (8, 2.0)


def test_an_update_that_has_begun_is_not_cut_short(session):
    server = _Server(session, "whole", 0)
    tracing = tf.compat.v1.RunOptions(output_partition_graphs=True)
    told = tf.compat.v1.RunMetadata()
    fed = dict(zip(server.feeds, ([3, 0], 1.0, 0.5), strict=True))
    session.run(server.count, fed, tracing, told)
    (graph,) = told.partition_graphs
    kinds = {node.op for node in graph.node}
    # Within the function of a branch, not among the others.
    assert kinds & {"If", "StatelessIf"} and "AssignVariableOp" not in kinds


def test_a_new_process_knows_counts_and_losses_but_no_push(session):
    server = _Server(session, "new", 5)
    server.push(3)
    server.take_place(2, [[-1, -1], [0, 1]], [False, True])
    assert server.push(3) == (7, 2.0)
    server.take_place(4, [[-1, 2], [0, 1]], [True, False])
    assert server.push(4) == (LOST, 2.0)


def test_a_batch_whose_step_has_ended_is_counted_once(session):
    server = _Server(session, "again", 5)
    # The process before was lost when it had applied a push, and the step had
    # been counted, but its answer was still on its way.
    server.take_place(6, [[2, 3], [4, 5]], [False, True])
    assert server.push(3) == (11, 1.5)
    assert server.push(8) == (11, 2.0)
    # Of the other worker, which is lost.
    assert server.push(5) == (12, 2.5)
    assert server.push(9) == (12, 3.0)
    # In the next epoch batches have numbers from 0 on.
    session.run(server.state.reset)
    assert server.push(3) == (13, 3.5)
