"""Numbers of batches that workers take, hold, end and leave behind."""

import pytest
import tensorflow as tf

from keras_sparsity._tf.tf_sessions import function_of
from keras_sparsity.asynchronous import batches

_NONE, _LOST = batches.NONE, batches.LOST


class _Workers:
    """Workers of one server; each takes as its own process would."""

    def __init__(self, size):
        graph = tf.Graph()
        session = tf.compat.v1.Session(graph=graph)
        with graph.as_default():
            of_ranks = [
                batches.Batches("/cpu:0", size, rank, "batches")
                for rank in range(size)
            ]
            self._take = [
                function_of(session, *each.take()) for each in of_ranks
            ]
            rank = tf.compat.v1.placeholder(tf.int64, [])
            first = of_ranks[0]
            self.lose = function_of(session, [rank], [first.leave_out(rank)])
            self.end = function_of(session, *first.end())
            self._leave = [
                function_of(session, *each.leave()) for each in of_ranks
            ]
            session.run([first.create])
            session.run([first.reset])

    def take(self, rank, ended):
        """`(number, set of the numbers that are held)`."""
        number, held = self._take[rank](batches.record(ended))
        return number, {int(each) for each in held if each >= 0}

    def leave(self, rank, ended):
        self._leave[rank](batches.record(ended))


@pytest.fixture
def workers():
    return _Workers


def test_a_push_is_under_way_while_the_next_number_is_taken(workers):
    two = workers(2)
    assert two.take(0, _NONE) == (0, {0})
    assert two.take(0, _NONE) == (1, {0, 1})
    assert two.take(1, _NONE) == (2, {0, 1, 2})
    assert two.take(0, 0) == (3, {1, 2, 3})
    # Both have ended.
    assert two.take(0, 3) == (4, {2, 4})
    two.lose(0)
    assert two.take(0, 4)[0] == _LOST
    assert two.take(1, _NONE) == (4, {2, 4})
    assert two.take(1, 4) == (5, {5})


def test_nothing_is_held_when_the_last_ones_have_ended(workers):
    one = workers(1)
    assert one.take(0, _NONE) == (0, {0})
    assert one.take(0, 0) == (1, {1})
    one.end(2)
    assert one.take(0, 1) == (_NONE, set())
    two = workers(2)
    two.take(0, _NONE)
    two.end(1)
    assert two.take(0, _NONE) == (_NONE, {0})
    assert two.take(1, _NONE) == (_NONE, {0})
    assert two.take(0, 0) == (_NONE, set())
    assert two.take(1, _NONE) == (_NONE, set())


def test_a_worker_that_leaves_hands_on_what_has_not_ended(workers):
    two = workers(2)
    two.end(4)
    for number, ended in enumerate([_NONE, _NONE, 0]):
        assert two.take(0, ended)[0] == number
    two.leave(0, 1)
    assert two.take(1, _NONE) == (2, {2})
    assert two.take(1, 2) == (3, {3})
    two.leave(1, 3)
    assert two.take(1, 3) == (_NONE, set())


def test_a_number_that_was_handed_out_again_is_lower_than_the_last_one(workers):
    two = workers(2)
    two.end(4)
    assert two.take(0, _NONE) == (0, {0})
    for number in (1, 2, 3):
        ended = number - 1 if number > 1 else _NONE
        assert two.take(1, ended)[0] == number
    two.lose(0)
    # While the push of 3 is under way.
    assert two.take(1, 2) == (0, {0, 3})
    assert two.take(1, 0) == (_NONE, set())


@pytest.mark.parametrize("has_ended", [False, True])
def test_two_lost_workers_had_the_same_number(workers, has_ended):
    three = workers(3)
    three.take(0, _NONE)
    for number in (1, 2, 3):
        ended = number - 1 if number > 1 else _NONE
        three.take(1, ended)
    three.lose(0)
    assert three.take(1, 2) == (0, {0, 3})
    # Its push is still under way, or has ended.
    assert three.take(1, 0 if has_ended else 3)[0] == 4
    three.lose(1)
    again = [three.take(2, _NONE)[0]]
    for _ in range(2):
        again.append(three.take(2, again[-1])[0])
    # 3 has ended in both cases.
    assert again == ([4, 5, 6] if has_ended else [0, 4, 5])
