"""Where the servers of other machines are found."""

import json

from keras_sparsity.asynchronous.servers import own_host


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
