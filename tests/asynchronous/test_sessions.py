"""Calls that are made again when a server has come back."""

import threading
import types

import pytest
import tensorflow as tf

from keras_sparsity.asynchronous import sessions
from keras_sparsity.asynchronous.sessions import LastingSession, Outages
from keras_sparsity.health import errors


@pytest.fixture
def outages(monkeypatch):
    monkeypatch.setattr(sessions, "_TOLD_SECONDS", 0.3)
    monkeypatch.setattr(sessions, "_SETTLE_SECONDS", 0.0)
    return Outages(True)


def test_a_call_waits_until_the_server_is_back(outages):
    outages.change(3, True)
    threading.Timer(0.6, outages.change, [3, False]).start()
    assert outages.outlast(0, True)
    assert outages.number == 1
    # An earlier session than the server's process.
    assert outages.outlast(0, True)
    # The session is of that process: the error has another cause.
    assert not outages.outlast(1, True)


def test_a_call_waits_for_all(outages):
    outages.change(3, True)
    outages.change(4, True)
    outages.change(3, False)
    assert not outages.outlast(0, False)
    outages.change(4, False)
    assert outages.outlast(0, False)


def test_a_server_that_has_just_come_back_may_be_out_of_reach(monkeypatch):
    monkeypatch.setattr(sessions, "_TOLD_SECONDS", 0.0)
    monkeypatch.setattr(sessions, "_SETTLE_SECONDS", 60.0)
    outages = Outages(True)
    assert not outages.outlast(0, True)
    outages.change(3, True)
    outages.change(3, False)
    assert outages.outlast(1, True)


def test_a_failure_of_the_run_ends_the_wait(outages, monkeypatch):
    outages.change(3, True)
    monkeypatch.setattr(errors, "_failure", "rank 3 is gone")
    assert not outages.outlast(0, True)


def test_without_new_processes_an_error_is_raised_at_once():
    outages = Outages(False)
    outages.change(3, True)
    assert not outages.outlast(0, True)


def _session(outages, graph):
    made = []

    def session(graph):
        made.append(tf.compat.v1.Session(graph=graph))
        return made[-1]

    cluster = types.SimpleNamespace(outages=outages, session=session)
    return LastingSession(cluster, graph), made


def test_a_new_session_makes_the_call_again(outages):
    graph = tf.Graph()
    with graph.as_default():
        fed = tf.compat.v1.placeholder(tf.int64, [])
        doubled = 2 * fed
    session, made = _session(outages, graph)
    double = session.function_of([fed], [doubled])
    assert double(4) == [8]
    outages.change(3, True)

    def fail(*args):
        outages.change(3, False)
        raise tf.errors.UnavailableError(None, None, "gone")

    made[0]._do_run = fail
    repeated = []
    assert double(5, again=lambda: repeated.append(1)) == [10]
    assert len(made) == 2 and repeated == [1]
    # The one before may still wait at others.
    assert double(6) == [12] and not made[0]._closed
    session.close()
    assert all(each._closed for each in made)


def test_an_error_without_an_outage_is_raised(outages):
    graph = tf.Graph()
    with graph.as_default():
        fed = tf.compat.v1.placeholder(tf.int64, [])
        checked = tf.debugging.assert_positive(fed)
        with tf.control_dependencies([checked]):
            same = tf.identity(fed)
    session, made = _session(outages, graph)
    with pytest.raises(tf.errors.InvalidArgumentError):
        session.function_of([fed], [same])(-1)
    assert len(made) == 1
    session.close()
