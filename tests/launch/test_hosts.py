"""Hosts, hostfiles and the places of processes."""

import pytest

from keras_sparsity.launch.hosts import (
    Host,
    local_hosts,
    parse_hostfile,
    parse_hosts,
    places,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [Host("a")]),
        ("a:2,b:3", [Host("a", 2), Host("b", 3)]),
        ("me@a.example.org:2", [Host("me@a.example.org", 2)]),
        ("localhost:2, 10.0.0.2:1", [Host("localhost", 2), Host("10.0.0.2")]),
        (
            "a:2+1,b:0+2",
            [Host("a", 3, num_servers=1), Host("b", 2, num_servers=2)],
        ),
    ],
)
def test_hosts_of_the_command_line(text, expected):
    assert parse_hosts(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Not a host name: ''"),
        ("a,,b", "Not a host name: ''"),
        ("a:0", "at least 1. Received: '0'"),
        ("a:two", "must be a number"),
        ("a:", "must be a number"),
        ("a:2+", "must be a number"),
        ("a:+1", "must be a number"),
        ("a:2+0", "at least 1. Received: '0', in 'a:2\\+0'"),
        ("a:2+1+1", "must be a number"),
        ("a:9999+2", "At most 10000 processes"),
        ("-oProxyCommand=x:1", "Not a host name"),
        ("a:1,a:2", "Host a is named more than once"),
    ],
)
def test_wrong_hosts(text, message):
    with pytest.raises(ValueError, match=message):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("node1", Host("node1")),
        ("node1:4", Host("node1", 4)),
        ("node1: 4", Host("node1", 4)),
        ("node1: 4+2", Host("node1", 6, num_servers=2)),
        ("node1 slots=4", Host("node1", 4)),
        ("node1  slots = 4  # fast", Host("node1", 4)),
        ("node1: 0,1", Host("node1", 2, ("0", "1"))),
        ("node1:3,", Host("node1", 1, ("3",))),
        ("node1: GPU-8f3a,GPU-11", Host("node1", 2, ("GPU-8f3a", "GPU-11"))),
    ],
)
def test_a_line_of_a_hostfile(line, expected, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(f"# our machines\n\n{line}\n")
    assert parse_hostfile(path) == [expected]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no host"),
        ("# none\n", "names no host"),
        ("a\nb slots=no\n", "line 2: The number of processes"),
        ("a: 0,x\n", "GPU ids must be numbers"),
        ("a: 0,0\n", "A GPU is named twice"),
        ("a b\n", "Not a host name: 'a b'"),
        ("a:1\na:2\n", "Host a is named more than once"),
    ],
)
def test_wrong_hostfiles(text, message, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        parse_hostfile(path)


def test_processes_are_numbered_host_by_host():
    found = places([Host("a", 2), Host("b", 1), Host("c", 2)])
    assert [place.rank for place in found] == [0, 1, 2, 3, 4]
    assert [place.host.name for place in found] == ["a", "a", "b", "c", "c"]
    # local rank, local size, and the same across: b has no local rank 1.
    assert [place.topology.to_override() for place in found] == [
        "0,2,0,3",
        "1,2,0,2",
        "0,1,1,3",
        "0,2,2,3",
        "1,2,1,2",
    ]


def test_emulated_machines():
    found = places(local_hosts(4, machines=2))
    assert [place.machine for place in found] == [0, 0, 1, 1]
    assert [place.topology.to_override() for place in found] == [
        "0,2,0,2",
        "1,2,0,2",
        "0,2,1,2",
        "1,2,1,2",
    ]


def test_servers_are_the_last_ranks():
    """And behind the workers of their machine."""
    hosts = parse_hosts("a:2+1,b:1+1,c:0+1")
    found = places(hosts)
    assert [place.machine for place in found] == [0, 0, 1, 0, 1, 2]
    assert [place.is_server for place in found] == [False] * 3 + [True] * 3
    assert [place.topology.local_rank for place in found] == [0, 1, 0, 2, 1, 0]


def test_servers_alone():
    with pytest.raises(ValueError, match="3 servers and no worker"):
        places(parse_hosts("a:0+2,b:0+1"))
