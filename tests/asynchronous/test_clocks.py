"""Steps of workers, and calls that are made twice."""

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf.tf_sessions import function_of
from keras_sparsity.asynchronous import clocks as clocks_module
from keras_sparsity.asynchronous.clocks import Clocks
from tests.asynchronous_functions import lost


class _Worker:
    """A worker of two, with a bound of one step."""

    def __init__(self, rank, session):
        self.session = session
        with session.graph.as_default():
            self.clocks = Clocks("/cpu:0", 2, rank, 1, "clocks")
            number = tf.compat.v1.placeholder(tf.int64, [])
            end = [self.clocks.end(number, 2 * number + rank)]
            finish = [self.clocks.finish(rank)]
            queues = self.clocks._tokens[rank], self.clocks._over
            sizes = [queue.size() for queue in queues]
            self.end = function_of(session, [number], end)
            self.finish = function_of(session, [], finish)
            self.begin = function_of(session, [], [self.clocks.begin()])
            self.restore = function_of(session, *self.clocks.restore())
            self._sizes = function_of(session, [], sizes)

    def num_tokens(self):
        """How many steps it may begin now."""
        return int(self._sizes()[0])

    def is_over(self):
        return self._sizes()[1] > 0


@pytest.fixture
def workers():
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        found = [_Worker(rank, session) for rank in range(2)]
        session.run([found[0].clocks.reset])
        yield found


def test_a_step_that_is_ended_twice_counts_once(workers):
    first, second = workers
    first.end(1)
    second.end(1)
    assert [w.num_tokens() for w in workers] == [3, 3]
    second.end(1)
    first.end(1)
    assert [w.num_tokens() for w in workers] == [3, 3]
    first.end(2)
    second.end(2)
    assert [w.num_tokens() for w in workers] == [4, 4]


@pytest.mark.parametrize("bound", [1, None])
def test_a_batch_counts_once_whoever_ends_its_step(bound):
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        name = f"counted/{bound}"
        clocks = [Clocks("/cpu:0", 2, r, bound, name) for r in range(2)]
        session.run([clocks[0].reset])

        def end(rank, *numbers):
            session.run([clocks[rank].end(*map(np.int64, numbers))])
            number, last = session.run(clocks[1].ended())
            return number, last.tolist()

        assert end(0, 1, 0) == (1, [[-1, 0], [-1, -1]])
        assert end(1, 1, 1) == (2, [[-1, 0], [-1, 1]])
        assert end(0, 2, 2) == (3, [[0, 2], [-1, 1]])
        # The answer was lost with a server, and the push came again.
        assert end(0, 2, 2) == (3, [[0, 2], [-1, 1]])
        # Both batches of a worker that is lost are handed out again.
        session.run([clocks[1].finish(0)])
        assert end(1, 2, 0) == end(1, 3, 2) == (3, [[0, 2], [-1, 1]])
        assert end(1, 4, 3) == (4, [[0, 2], [1, 3]])
        session.run([clocks[0].reset])
        number, last = session.run(clocks[1].ended())
        assert number == 0 and (last == -1).all()


@pytest.mark.parametrize("num_begun", [0, 1, 2])
def test_a_token_that_was_taken_in_vain_is_given_back(workers, num_begun):
    first, second = workers
    for number in range(num_begun):
        first.begin()
        first.end(number + 1)
        second.end(number + 1)
    before = first.num_tokens()
    first.restore(num_begun)
    assert first.num_tokens() == before
    first.begin()
    first.restore(num_begun)
    assert first.num_tokens() == before
    assert second.num_tokens() == 2 + num_begun


def test_of_the_slowest_that_goes_on(workers):
    first, second = workers
    second.finish()
    first.begin()
    first.end(1)
    assert first.num_tokens() == 2
    first.begin()
    first.restore(1)
    assert first.num_tokens() == 2
    first.finish()
    before = first.num_tokens()
    first.restore(1)
    assert first.num_tokens() == before


@pytest.fixture
def cut(workers, monkeypatch):
    """Makes moves of the first worker, which is lost before it gives tokens.

    `cut(move)`: a function of the worker's `Clocks` that makes the operations.
    """
    stock = clocks_module._given

    def failing(queue, number):
        told = tf.numpy_function(lost, [number], tf.int64)
        return stock(queue, tf.ensure_shape(told, []))

    def cut(move):
        with monkeypatch.context() as patched:
            patched.setattr(clocks_module, "_given", failing)
            moved = move(workers[0].clocks)
        with pytest.raises(tf.errors.OpError, match="no luck"):
            workers[0].session.run(moved)

    with workers[0].session.graph.as_default():
        yield cut


def test_a_move_that_was_cut_is_made_again(workers, cut):
    first, second = workers
    second.end(1)
    for _ in range(2):
        second.begin()
    assert second.num_tokens() == 0
    cut(lambda clocks: clocks.end(np.int64(1), np.int64(2)))
    cut(lambda clocks: clocks.finish(0))
    # As others do when it is lost. Now the second one is the slowest.
    first.finish()
    assert second.num_tokens() == 1
    second.end(2)
    assert second.num_tokens() == 2
    cut(lambda clocks: clocks.finish(1))
    assert not first.is_over()
    second.finish()
    assert first.is_over()
