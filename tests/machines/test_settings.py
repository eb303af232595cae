"""Settings of the environment: whatever they hold is read, or explained."""

import functools
import json

import pytest

import keras_sparsity as ks
from keras_sparsity.collectives import native, startup
from keras_sparsity.health import channel
from keras_sparsity.machines import settings

_TWO = ["a:1", "b:2"]
_TASK = {"type": "worker", "index": 0}


@pytest.fixture
def tf_config(monkeypatch):
    def set_config(value):
        text = value if isinstance(value, str) else json.dumps(value)
        monkeypatch.setenv("TF_CONFIG", text)

    monkeypatch.delenv("HOROVOD_RANK", raising=False)
    return set_config


@pytest.mark.parametrize(
    ("config", "addresses", "rank"),
    [
        ("", [], None),
        ("{}", [], None),
        ({"task": _TASK}, [], None),
        ({"cluster": {}}, [], None),
        (
            {
                "cluster": {"ps": ["s:1", "t:2"], "worker": _TWO},
                "task": {"type": "ps", "index": 1},
            },
            [*_TWO, "s:1", "t:2"],
            3,
        ),
        ({"cluster": {"worker": _TWO}, "task": _TASK}, _TWO, 0),
        (
            {
                "cluster": {"worker": ["a:1", "[::1]:2"], "chief": ["c:3"]},
                "task": {"type": "worker", "index": "1"},
            },
            ["c:3", "a:1", "[::1]:2"],
            2,
        ),
    ],
)
def test_a_cluster(config, addresses, rank, tf_config):
    tf_config(config)
    tasks = settings.cluster()
    assert [address for *_, address in tasks] == addresses
    if rank is not None:
        assert settings.cluster_rank(tasks) == rank
    is_native = len(addresses) > 1
    assert startup._found_engine() == ("native" if is_native else "local")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("nonsense", "must be a JSON object"),
        ("[" * 100_000, "must be a JSON object"),
        ("3", "must be a JSON object"),
        ("null", "must be a JSON object"),
        (["a:1"], "must be a JSON object"),
        ({"cluster": 3}, '"cluster" must be an object'),
        ({"cluster": {"ps": _TWO}}, 'need a "worker" beside them'),
        ({"cluster": _TWO}, '"cluster" must be an object'),
        ({"cluster": {"worker": "a:1"}}, '"worker" must be a list'),
        ({"cluster": {"worker": {"0": "a:1"}}}, '"worker" must be a list'),
        ({"cluster": {"worker": [1, 2]}}, '"host:port", not 1'),
        ({"cluster": {"worker": ["a", "b"]}}, "\"host:port\", not 'a'"),
        ({"cluster": {"worker": ["a:1", "b:x"]}}, "not 'b:x'"),
        ({"cluster": {"worker": ["a:1", "b:0"]}}, "not 'b:0'"),
        ({"cluster": {"worker": ["a:1", "b:99999"]}}, "not 'b:99999'"),
        ({"cluster": {"worker": ["a:1", ":2"]}}, "not ':2'"),
        ({"cluster": {"worker": ["a:1", None]}}, "not None"),
        ({"cluster": {"worker": ["a:1", "http://b:2"]}}, "not 'http://b:2'"),
        ({"cluster": {"worker": ["a:1", "a:1"]}}, "not 'a:1' twice"),
    ],
)
def test_no_cluster(config, message, tf_config):
    tf_config(config)
    own = functools.partial(channel._own_addresses, 0)
    for read in (startup._found_engine, native.others, own):
        with pytest.raises(ValueError, match="TF_CONFIG is not valid") as error:
            read()
        assert message in str(error.value)
        assert 'Expected, for two processes: {"cluster"' in str(error.value)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (None, '"task" must be an object with "type" and "index"'),
        ([], '"task" must be an object'),
        ({}, '"task" must be an object'),
        ({"type": "worker"}, '"task" must be an object'),
        ({"type": "worker", "index": None}, "whole number, not None"),
        ({"type": "worker", "index": True}, "whole number, not True"),
        ({"type": "worker", "index": "x"}, "whole number, not 'x'"),
        ({"type": "worker", "index": 2}, "does not list"),
        ({"type": "worker", "index": -1}, "does not list"),
        ({"type": ["worker"], "index": 0}, "does not list"),
        ({"type": "ps", "index": 0}, "process ps 0, which its cluster does"),
    ],
)
def test_no_task(task, message, tf_config):
    tf_config({"cluster": {"worker": _TWO}, "task": task})
    with pytest.raises(ValueError, match="TF_CONFIG") as error:
        native.others()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("rank", "size"),
    [("x", "2"), ("0", "x"), ("2", "2"), ("-1", "2"), ("0", None), ("", "")],
)
@pytest.mark.parametrize("kind", ["", "LOCAL_", "CROSS_"])
def test_no_place_for_horovod(kind, rank, size, monkeypatch):
    for other in ("", "LOCAL_", "CROSS_"):
        monkeypatch.setenv(f"HOROVOD_{other}RANK", "1")
        monkeypatch.setenv(f"HOROVOD_{other}SIZE", "2")
    settings.check_horovod()
    monkeypatch.setenv(f"HOROVOD_{kind}RANK", rank)
    if size is None:
        monkeypatch.delenv(f"HOROVOD_{kind}SIZE")
    else:
        monkeypatch.setenv(f"HOROVOD_{kind}SIZE", size)
    with pytest.raises(ValueError, match=f"HOROVOD_{kind}RANK and .*Received"):
        settings.check_horovod()


@pytest.mark.parametrize("address", ["no.such.host.invalid", "a b", "." * 300])
def test_an_address_that_does_not_resolve(address, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("HOROVOD_HOSTNAME", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    known = channel._own_addresses(0)
    monkeypatch.setenv("MASTER_ADDR", address)
    assert set(channel._own_addresses(0)) == set(known) - {"127.0.0.1"}


@pytest.mark.parametrize(
    "timeout", [0, -600, 4.9, float("nan"), float("inf"), True, "soon", [9]]
)
def test_what_is_no_timeout(timeout, monkeypatch):
    message = "must be a number of seconds, at least 5 .*Received: "
    with pytest.raises(ValueError, match=f"`timeout` {message}"):
        ks.HybridStrategy(timeout=timeout)
    monkeypatch.setenv("KERAS_SPARSITY_TIMEOUT", str(timeout))
    with pytest.raises(ValueError, match=f"KERAS_SPARSITY_TIMEOUT {message}"):
        ks.HybridStrategy()


def test_the_timeouts_defaults(monkeypatch):
    monkeypatch.delenv("KERAS_SPARSITY_TIMEOUT", raising=False)
    assert settings.checked_timeout() == 600
    monkeypatch.setenv("KERAS_SPARSITY_TIMEOUT", "20")
    assert settings.checked_timeout() == 20
    assert settings.checked_timeout(7) == 7


@pytest.mark.parametrize("seed", ["", "-1", "1.5", "one", str(2**32)])
def test_what_is_no_seed(seed, monkeypatch):
    monkeypatch.setenv("KERAS_SPARSITY_SEED", seed)
    with pytest.raises(ValueError, match="KERAS_SPARSITY_SEED must be a whole"):
        settings.seed()


@pytest.mark.parametrize(
    ("given", "num_servers"), [(None, 2), ("", 2), (" 2", 2)]
)
def test_servers_of_a_cluster(given, num_servers, tf_config, monkeypatch):
    tf_config({"cluster": {"worker": ["a:1"], "ps": ["b:1", "c:1"]}})
    monkeypatch.delenv(settings.SERVERS_VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(settings.SERVERS_VARIABLE, given)
    assert settings.num_servers(3, settings.cluster()) == num_servers


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("one", "must be a whole number, .* Received: 'one'"),
        ("-1", "must be a whole number, .* Received: '-1'"),
        ("1", "the same number of servers. Received: 1 and 2"),
    ],
)
def test_wrong_numbers_of_servers(given, message, tf_config, monkeypatch):
    tf_config({"cluster": {"worker": ["a:1"], "ps": ["b:1", "c:1"]}})
    monkeypatch.setenv(settings.SERVERS_VARIABLE, given)
    with pytest.raises(ValueError, match=message):
        settings.num_servers(3, settings.cluster())


def test_servers_need_a_worker(monkeypatch):
    monkeypatch.setenv(settings.SERVERS_VARIABLE, "2")
    assert settings.num_servers(3) == 2
    with pytest.raises(ValueError, match="2 servers among 2 processes"):
        settings.num_servers(2)
