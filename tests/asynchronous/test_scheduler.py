"""The process that keeps the facts; trainings are in `test_returns.py`."""

import queue
import socket
import sys
import threading
import types

import pytest

from keras_sparsity.asynchronous import scheduler
from keras_sparsity.asynchronous.scheduler import Scheduler, SchedulerRegistry
from keras_sparsity.health import channel as channels


class _Registry:
    def end_returns(self):
        return True

    def remove(self, name):
        raise KeyError(name)


@pytest.fixture
def remote():
    """A `SchedulerRegistry` of a `_Registry`."""
    server = socket.create_server(("127.0.0.1", 0))

    def admit(rank, channel):
        assert rank == 3
        threading.Thread(
            target=scheduler._answer, args=(_Registry(), channel)
        ).start()

    door = channels.Door(server, ["127.0.0.1"], admit)
    found = SchedulerRegistry(door.facts, 3)
    yield found
    found._channel.close()
    door.close()


def test_calls_have_results_and_errors(remote):
    assert remote.end_returns() is True
    with pytest.raises(RuntimeError, match="failed: KeyError: 'training/0'"):
        remote.remove("training/0")
    with pytest.raises(AttributeError):
        _ = remote.returning


def test_a_call_of_a_scheduler_that_is_gone_fails(remote):
    remote._channel.close()
    with pytest.raises(RuntimeError, match="The scheduler failed: it is gone"):
        remote.end_returns()


def test_a_scheduler_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(scheduler, "_program", lambda: "raise SystemExit(3)")
    ranks = types.SimpleNamespace(rank=2, num_workers=2, num_servers=1)
    with pytest.raises(RuntimeError, match="ended with code 3"):
        started = Scheduler()
        started.begin([], ranks, {"timeout": 600, "one_machine": True})
        while started.facts(1.0) is None:
            pass


def test_it_ends_when_it_cannot_act_on_a_loss(monkeypatch):
    has_ended = threading.Event()
    monkeypatch.setattr(scheduler.os, "_exit", lambda code: has_ended.set())
    monkeypatch.setattr(scheduler.launcher, "tell", lambda rank, lost: None)

    def fail(rank, is_lost):
        raise ValueError("no luck")

    registry = types.SimpleNamespace(change=None)
    cluster = types.SimpleNamespace(size=3, change=fail)
    scheduler._changing(cluster, registry)(1, True)
    assert has_ended.wait(20)


def test_a_loss_is_told_while_another_one_waits_for_its_server(monkeypatch):
    told, has_ended = queue.SimpleQueue(), threading.Event()
    tell = types.SimpleNamespace(tell=lambda rank, lost: told.put(lost))
    monkeypatch.setattr(scheduler, "launcher", tell)
    changed = queue.SimpleQueue()

    def change(rank, is_lost):
        # A server that stands still ends when the launcher knows that.
        assert has_ended.wait(60)
        changed.put(rank)

    cluster = types.SimpleNamespace(size=4, change=lambda rank, is_lost: None)
    registry = types.SimpleNamespace(change=change)
    on_change = scheduler._changing(cluster, registry)
    on_change(1, True)
    on_change(3, True)
    assert [told.get(timeout=20) for _ in range(2)] == [1, 3]
    has_ended.set()
    assert [changed.get(timeout=20) for _ in range(2)] == [1, 3]


def test_it_finds_the_modules_that_its_server_finds(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/a", "/b"])
    assert "sys.path[:] = ['/a', '/b']" in scheduler._program()
