"""Steps of workers, and calls that are made twice."""

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity._tf.tf_sessions import function_of
from keras_sparsity.asynchronous.clocks import Clocks


class _Worker:
    """A worker of two, with a bound of one step."""

    def __init__(self, rank, session):
        with session.graph.as_default():
            self.clocks = Clocks("/cpu:0", 2, rank, 1, "clocks")
            number = tf.compat.v1.placeholder(tf.int64, [])
            end = [self.clocks.end(number)]
            finish = [self.clocks.finish(rank)]
            tokens = [self.clocks._tokens[rank].size()]
            self.end = function_of(session, [number], end)
            self.finish = function_of(session, [], finish)
            self.begin = function_of(session, [], [self.clocks.begin()])
            self.restore = function_of(session, *self.clocks.restore())
            self._tokens = function_of(session, [], tokens)

    def num_tokens(self):
        """How many steps it may begin now."""
        return int(self._tokens()[0])


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
def test_steps_are_counted_of_workers_that_are_gone_too(bound):
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        name = f"counted/{bound}"
        clocks = [Clocks("/cpu:0", 2, r, bound, name) for r in range(2)]
        session.run([clocks[0].reset])
        for number in (1, 2, 2):  # the last one twice
            session.run([clocks[0].end(np.int64(number))])
        session.run([clocks[1].end(np.int64(1))])
        session.run([clocks[1].finish(0)])
        assert session.run(clocks[1].ended()).tolist() == [2, 1]
        session.run([clocks[0].reset])
        assert session.run(clocks[1].ended()).tolist() == [0, 0]


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
