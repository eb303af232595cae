import socket

import pytest

from keras_sparsity.machines import ports


def test_reserved_ports_are_not_found_twice():
    with ports.reserved(3) as found:
        assert len(set(found)) == 3
        for port in found:
            with socket.socket() as other, pytest.raises(OSError):
                other.bind(("", port))
    with socket.socket() as other:
        other.bind(("", found[0]))


@pytest.mark.parametrize("host", ["127.0.0.1", "::"])
def test_a_process_listens_at_a_reserved_port(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ports.reserved(1) as (port,):
        with (
            socket.create_server((host, port), family=family) as server,
            socket.create_connection((host, port)) as client,
        ):
            accepted, address = server.accept()
            accepted.close()
            assert address == client.getsockname()


def test_too_few_ports(monkeypatch):
    monkeypatch.setattr(ports, "RANGE", ports.RANGE[:2])
    with pytest.raises(ValueError, match="from 15000 to 15001 .* has [0-2]"):
        ports.free(3)
