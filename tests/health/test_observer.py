"""The observer's report of what this process is doing."""

import dataclasses
import threading
import time
import types

import pytest
import tensorflow as tf

from keras_sparsity.health import observer as observer_module
from keras_sparsity.health.journal import Journal
from keras_sparsity.health.observer import Observer

_functions = []


@pytest.fixture
def clock(monkeypatch):
    """That of observers, which moves when it is told: its `now` grows."""
    found = types.SimpleNamespace(now=100.0, process_time=time.process_time)
    found.monotonic = lambda: found.now
    monkeypatch.setattr(observer_module, "time", found)
    return found


def in_a_call(journal, traced):
    """Runs a call that waits; returns what lets it go on."""
    begun, go_on = threading.Event(), threading.Event()

    def wait(x):
        begun.set()
        go_on.wait(30)
        return x

    def collective(x):
        return tf.numpy_function(wait, [x], x.dtype) if traced else wait(x)

    def call(x):
        site = journal.site("all_reduce", "a", "float32", (2,))
        return journal.run(site, [x], lambda: collective(x))

    function = tf.function(call) if traced else call
    thread = threading.Thread(target=function, args=[tf.ones([2])])
    thread.start()
    begun.wait(30)

    def end():
        go_on.set()
        thread.join(30)

    return end


def test_a_waiting_call_is_reported_and_not_forgotten():
    for traced in (False, True):
        journal = Journal()
        observer = Observer(journal)
        end = in_a_call(journal, traced)
        observer.look()
        reports = [observer.look() for _ in range(3)]
        assert {report.status for report in reports} == {"blocked"}
        assert reports[0].open_calls[0].name == "a"
        assert 0 < reports[0].stalled_seconds < reports[2].stalled_seconds
        assert "test_observer.py" in reports[0].place
        end()
        observer.look()
        assert observer.look().status == "working"


def test_calls_that_have_ended_here_are_counted_when_asked_for():
    journal = Journal()
    observer = Observer(journal)
    in_a_call(journal, traced=False)()
    end = in_a_call(journal, traced=False)
    observer.look()
    report = observer.look()
    (call,), (begun,) = report.open_calls, report.begun
    other = dataclasses.replace(call, name="b")
    left = observer.look(closely=True, calls=[call, other]).left
    end()
    assert begun == 2
    assert left == ((call, 1), (other, 0))


def test_a_call_that_has_just_begun_is_named_when_asked_for():
    journal = Journal()
    end = in_a_call(journal, False)
    assert Observer(journal).look(closely=True).status == "blocked"
    end()


def test_a_call_that_failed_unnoticed_is_no_waiting(clock):
    journal = Journal()
    fail_in_a_call(journal)
    assert journal.open_sites()
    observer = Observer(journal)
    observer.look()
    clock.now += 0.9
    assert observer.look().status == "blocked"  # it may still be asked about
    clock.now += 0.2
    assert observer.look().status == "working"
    fail_in_a_call(journal)
    assert observer.look(closely=True).status == "blocked"


def test_a_call_that_failed_is_no_waiting_while_a_later_one_waits(clock):
    journal = Journal()
    observer = Observer(journal)
    fail_in_a_call(journal)
    end = in_a_call(journal, traced=False)
    for _ in range(4):
        report = observer.look(closely=True)
        clock.now += 0.5
    end()
    assert [call.dtype for call in report.open_calls] == ["float32"]
    assert "an error has ended other calls" in report.note


def test_a_call_that_fails_after_a_pause_may_still_be_asked_about(clock):
    journal = Journal()
    observer = Observer(journal)
    observer.look()
    clock.now += 1.1
    fail_in_a_call(journal)
    assert observer.look(closely=True).status == "blocked"


def fail_in_a_call(journal):
    def fail():
        with tf.control_dependencies([tf.debugging.Assert(False, ["no"])]):
            return tf.ones([2])

    @tf.function
    def step():
        site = journal.site("all_reduce", "a")
        return journal.run(site, [], fail)

    with pytest.raises(tf.errors.InvalidArgumentError):
        step()
    _functions.append(step)  # a deleted one takes its calls with it
