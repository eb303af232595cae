"""Ranks tell the launcher who is lost, and how a new process joins."""

import json
import socket
import time

import pytest

from keras_sparsity.health import channel
from keras_sparsity.launch.hosts import local_hosts, places
from keras_sparsity.launch.listener import Listener
from keras_sparsity.machines import addresses, door

_OF_RANKS = places(local_hosts(2, num_servers=1))


def _facts(listener, restarts=False):
    variables = listener.variables(restarts)
    assert list(variables) == [door.LAUNCHER_VARIABLE]
    return json.loads(variables[door.LAUNCHER_VARIABLE])


def _until(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_rank_is_heard(restarts):
    with Listener(_OF_RANKS) as listener:
        facts = _facts(listener, restarts)
        assert facts["restarts"] is restarts
        own = channel.call(facts, 2, "The launcher")
        own.send(facts={"size": 3})
        own.send(lost=1)
        _until(lambda: listener.lost)
        own.send(lost=0)
        _until(lambda: listener.lost == {0, 1})
        assert listener.facts == {"size": 3}
        own.close()
    with pytest.raises(RuntimeError, match="The launcher could not be"):
        channel.call(facts, 2, "The launcher", 0.1)


def test_without_servers_none_is_open():
    with Listener(places(local_hosts(2))) as listener:
        assert listener.variables(True) == {}


_IPV6 = pytest.mark.skipif(
    not socket.has_dualstack_ipv6(), reason="This machine has no IPv6"
)


@pytest.mark.parametrize(
    ("here", "bound", "reached"),
    [
        ("127.0.0.2", "127.0.0.2", "127.0.0.2"),
        # Of no machine here, but of a translation.
        ("192.0.2.1", "", "127.0.0.1"),
        pytest.param("::1", "::1", "::1", marks=_IPV6),
        pytest.param("2001:db8::5", "::", "::1", marks=_IPV6),
    ],
)
def test_it_is_reached_at_its_address(here, bound, reached):
    assert addresses.to_bind(here) == bound
    with Listener(_OF_RANKS, here, []) as listener:
        facts = _facts(listener)
        assert facts["hosts"] == [here]
        facts["hosts"] = [reached]
        own = channel.call(facts, 2, "The launcher")
        own.send(lost=1)
        _until(lambda: listener.lost == {1})
        own.close()
