"""The process that keeps the facts; trainings are in `test_returns.py`."""

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

    cluster = types.SimpleNamespace(size=3, change=fail)
    scheduler._changing(cluster, None)(1, True)
    assert has_ended.wait(20)


def test_it_finds_the_modules_that_its_server_finds(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/a", "/b"])
    assert "sys.path[:] = ['/a', '/b']" in scheduler._program()
