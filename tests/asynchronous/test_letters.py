"""What is left of a letter whose rank is lost while it writes; others read
letters in all trainings."""

import types

import pytest
import tensorflow as tf

from keras_sparsity.asynchronous.cells import Cell
from keras_sparsity.asynchronous.letters import Letters
from tests.asynchronous_functions import lost


class _Cluster:
    """Two ranks, whose letters are in the session of one.

    Attributes:
        made: the session.
    """

    size, owners, scheduler = 2, [0], 0

    def device(self, number):
        return "/cpu:0"

    def session(self, graph):
        self.made = tf.compat.v1.Session(graph=graph)
        return self.made


def test_a_letter_is_there_before_its_number(monkeypatch):
    stock, cluster = Cell.assign, _Cluster()

    def assign(cell, value):
        if cell.dtype == tf.string:
            value = tf.numpy_function(lost, [value], tf.string)
        return stock(cell, value)

    with monkeypatch.context() as patched:
        patched.setattr(Cell, "assign", assign)
        servers = types.SimpleNamespace(cluster=cluster, is_alone=False)
        letters = Letters(servers, 1)
    with cluster.made as session, session.graph.as_default():
        session.run(letters._cells.begun())
        with pytest.raises(tf.errors.OpError, match="no luck"):
            letters.gather("value", 7)
        assert session.run(letters._cells.numbers.read()).tolist() == [0, 0]
