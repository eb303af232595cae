"""This machine's addresses, and those at which others reach it."""

import pytest

from keras_sparsity.machines import addresses

_VARIABLES = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "MASTER_ADDR"


def test_an_interface_is_found_by_its_address():
    assert addresses.interface("127.0.0.1") == "lo"
    assert addresses.interface("192.0.2.1") is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, []),
        ({"MASTER_ADDR": "127.0.0.1"}, ["127.0.0.1"]),
        # Of `keras-sparsity run`.
        ({_VARIABLES[0]: "127.0.0.1:1234/secret"}, ["127.0.0.1"]),
        (dict.fromkeys(_VARIABLES, "127.0.0.1"), ["127.0.0.1"] * 2),
    ],
)
def test_the_way_to_the_launcher_says_the_own_one(given, expected, monkeypatch):
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert addresses.towards_launcher() == expected
