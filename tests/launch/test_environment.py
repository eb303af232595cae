"""The variables of each rank."""

import json

import pytest

from keras_sparsity.launch import environment
from keras_sparsity.launch.hosts import Host, local_hosts, places
from keras_sparsity.machines import firewall
from keras_sparsity.machines.settings import ENGINES


def variables_of(engine, hosts, network=None, **shared):
    with environment.of_ranks(
        engine, places(hosts), shared, network
    ) as variables:
        return variables


def test_native_ranks_have_one_cluster():
    found = variables_of("native", local_hosts(2))
    configs = [json.loads(variables["TF_CONFIG"]) for variables in found]
    assert configs[0]["cluster"] == configs[1]["cluster"]
    workers = configs[0]["cluster"]["worker"]
    assert len(set(workers)) == 2
    assert all(worker.startswith("127.0.0.1:") for worker in workers)
    assert [config["task"]["index"] for config in configs] == [0, 1]


def test_hosts_have_their_own_addresses_cores_and_gpus():
    network = environment.Network(
        addresses=["10.0.0.1", "10.0.0.2", "10.0.0.2"],
        ports=[1, 2, 3],
        here="10.0.0.3",
        networks=["10.0.0.0/30"],
        cores=[8, 8],
    )
    hosts = [Host("a"), Host("b", 2, ("4", "5"))]
    found = variables_of("native", hosts, network, MINE="x")
    workers = json.loads(found[0]["TF_CONFIG"])["cluster"]["worker"]
    assert workers == ["10.0.0.1:1", "10.0.0.2:2", "10.0.0.2:3"]
    threads = [v["TF_NUM_INTRAOP_THREADS"] for v in found]
    assert threads == ["8", "4", "4"]
    assert [v.get("CUDA_VISIBLE_DEVICES") for v in found] == [
        None,
        "4,5",
        "4,5",
    ]
    for variables in found:
        assert variables["MINE"] == "x"
        assert variables[firewall.VARIABLE] == "10.0.0.0/30"
        # Hosts of different size: a cross rank does not name a machine.
        assert "KERAS_SPARSITY_TOPOLOGY" not in variables


def test_addresses_of_ipv6_stand_in_brackets():
    network = environment.Network(addresses=["fd00::1", "b"], ports=[1, 2])
    found = variables_of("native", [Host("a"), Host("b")], network)
    workers = json.loads(found[0]["TF_CONFIG"])["cluster"]["worker"]
    assert workers == ["[fd00::1]:1", "b:2"]


def test_emulated_machines_share_the_cores():
    network = environment.Network(cores=[8, 8])
    found = variables_of("native", local_hosts(4, machines=2), network)
    assert {v["TF_NUM_INTRAOP_THREADS"] for v in found} == {"2"}
    assert [v["KERAS_SPARSITY_TOPOLOGY"] for v in found] == [
        "0,2,0,2",
        "1,2,0,2",
        "0,2,1,2",
        "1,2,1,2",
    ]


def test_shared_variables_take_precedence_over_defaults():
    found = variables_of("local", local_hosts(1), OMP_NUM_THREADS="7")
    assert found[0]["OMP_NUM_THREADS"] == "7"


def test_variables_of_an_outer_launcher_are_left_out(monkeypatch):
    outer = ["TF_CONFIG", "HOROVOD_RANK", "HOROVOD_CROSS_SIZE"]
    outer += ["KERAS_SPARSITY_LAUNCHER", "KERAS_SPARSITY_JOINS"]
    for name in (*outer, "OTHER"):
        monkeypatch.setenv(name, "1")
    shared = environment.shared({"TF_CPP_MIN_LOG_LEVEL": "0"})
    assert shared["OTHER"] == "1"
    assert not {*outer} & {*shared}
    assert shared["TF_CPP_MIN_LOG_LEVEL"] == "0"


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_has_variables(engine):
    assert engine in environment._VARIABLES


def test_servers_are_counted_and_see_no_accelerator():
    """They share their workers' cores, which mostly compute while they wait."""
    network = environment.Network(
        addresses=["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.1"],
        ports=[1, 2, 3, 4],
        cores=[8, 8],
    )
    hosts = [
        Host("a", 3, ("4", "5"), num_servers=1),
        Host("b", 1, num_servers=1),
    ]
    found = variables_of("native", hosts, network)
    assert [v["KERAS_SPARSITY_SERVERS"] for v in found] == ["2"] * 4
    devices = [v["CUDA_VISIBLE_DEVICES"] for v in found]
    assert devices == ["4,5", "4,5", "-1", "-1"]
    threads = [v["TF_NUM_INTRAOP_THREADS"] for v in found]
    assert threads == ["4", "4", "4", "8"]
