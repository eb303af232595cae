"""Where the servers of other machines are found."""

import json
import socket
import types

import pytest

from keras_sparsity.asynchronous.cluster import own_host, told_of_open


def test_one_machine_needs_no_network(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert own_host((0, 0, 0)) == "127.0.0.1"


def test_machines_have_the_names_of_the_cluster(monkeypatch):
    task = {"type": "worker", "index": 1}
    workers = ["first:1000", "[fd00::2]:1000"]
    cluster = {"cluster": {"worker": workers}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    assert own_host((0, 1)) == "[fd00::2]"


@pytest.mark.parametrize(
    ("rendezvous", "expected"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1:1234/secret", "127.0.0.1"),  # of `keras-sparsity run`
        (None, socket.gethostname()),  # of MPI
    ],
)
def test_under_horovod_the_route_to_its_rendezvous_says_it(
    rendezvous, expected, monkeypatch
):
    for name in ("TF_CONFIG", "MASTER_ADDR", "HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        monkeypatch.delenv(name, raising=False)
    if rendezvous:
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", rendezvous)
    assert own_host((0, 1)) == expected


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
