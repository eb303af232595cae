"""Where the servers of other machines are found."""

import json
import types

import pytest

from keras_sparsity.asynchronous.servers import own_host, told_of_open


def test_one_machine_needs_no_network(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert own_host((0, 0, 0)) == "127.0.0.1"


def test_machines_have_the_names_of_the_cluster(monkeypatch):
    task = {"type": "worker", "index": 1}
    workers = ["first:1000", "[fd00::2]:1000"]
    cluster = {"cluster": {"worker": workers}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    assert own_host((0, 1)) == "[fd00::2]"


def test_under_horovod_the_route_to_its_rendezvous_says_it(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    assert own_host((0, 1)) == "127.0.0.1"


@pytest.mark.parametrize(
    ("engine", "size", "local_rank", "is_warned_of"),
    [
        ("local", 1, 0, True),
        ("horovod", 4, 0, True),
        ("horovod", 4, 1, False),  # the machine's first rank says it
        ("native", 4, 0, False),  # the engine has said it
    ],
)
def test_an_open_server_is_told_of_once(
    engine, size, local_rank, is_warned_of, caplog
):
    tell = told_of_open(
        types.SimpleNamespace(engine=engine, size=size, local_rank=local_rank)
    )
    tell("port 15000 is open")
    found = [record.levelname for record in caplog.records]
    assert found == ["WARNING"] * is_warned_of
