"""Messages of ranks of which some are lost."""

import types

import numpy as np
import pytest
import tensorflow as tf

from keras_sparsity.asynchronous import meeting as meetings
from keras_sparsity.asynchronous.meeting import Meeting
from keras_sparsity.collectives.base import Collectives
from keras_sparsity.machines.topology import Topology


class _Letters:
    """This rank's, and those that the others have written.

    Args:
        others: for each message, a dict from a rank to its letter.
    """

    def __init__(self, rank, others):
        self.rank, self._others, self.sent = rank, iter(others), []

    def gather(self, name, value):
        self.sent.append(value)
        return {**next(self._others), self.rank: value}


@pytest.mark.parametrize("is_lost", [False, True])
def test_the_root_alone_sends_a_broadcast(is_lost):
    roots, own = np.float32([1, 2]), np.float32([3, 4])
    others = [{2: None}, {2: None}] if is_lost else [{0: roots, 2: None}]
    letters = _Letters(1, others)
    meeting = Meeting(letters, [0, 1, 2], "native")
    found = meeting.broadcast(tf.constant(own), 0, "values")
    # In place of a lost root, the first rank that is left.
    np.testing.assert_array_equal(found, own if is_lost else roots)
    assert letters.sent[0] is None
    np.testing.assert_array_equal(letters.sent[1:], [own] * is_lost)


def test_a_mean_is_that_of_the_ranks_that_are_left():
    letters = _Letters(1, [{2: np.float32([5, 1])}, {2: np.int32([4])}])
    meeting = Meeting(letters, [0, 1, 2], "native")  # 0 is lost
    ranks = Collectives(meeting, Topology(1, 3))
    (mean,) = ranks.all_reduce([tf.constant([3.0, 1.0])], "mean")
    np.testing.assert_array_equal(mean, [4, 1])
    (total,) = ranks.all_reduce([tf.constant([3])])
    np.testing.assert_array_equal(total, [7])


def test_the_launcher_is_told_by_one_message():
    """The ranks know since they began whether they are on one machine."""
    sent = []

    def gather_objects(value, name):
        sent.append(name)
        return [value]

    ranks = types.SimpleNamespace(rank=1, gather_objects=gather_objects)
    servers = types.SimpleNamespace(is_first=False, is_alone=False)
    meetings._tell_launcher(servers, ranks)
    assert sent == ["servers/launcher"]
