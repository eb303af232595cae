"""A rank tells the launcher, if that hears of lost ranks."""

import json
import socket

import pytest

from keras_sparsity.health import launcher
from keras_sparsity.machines import door


@pytest.fixture(autouse=True)
def given(monkeypatch):
    """`given(facts)` sets how the launcher is reached."""

    def forget():
        door._given.cache_clear()
        launcher._connected.cache_clear()

    def give(facts):
        monkeypatch.setenv(door.LAUNCHER_VARIABLE, json.dumps(facts))

    monkeypatch.delenv(door.LAUNCHER_VARIABLE, raising=False)
    forget()
    yield give
    forget()


def test_without_a_launcher_none_hears():
    assert not launcher.tell(2, lost=1)
    assert door.launcher() is None and not door.is_wanted()
    assert launcher.problem(2) is None


def test_one_that_cannot_be_reached_is_a_problem(given, monkeypatch):
    monkeypatch.setattr(launcher, "_CONNECT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    facts = {"hosts": ["127.0.0.1"], "port": port, "secret": "00"}
    given({**facts, "restarts": True})
    assert door.is_wanted()
    for lost in (None, 1):
        assert not launcher.tell(2, lost=lost)
    assert "The launcher could not be reached" in launcher.problem(2)
