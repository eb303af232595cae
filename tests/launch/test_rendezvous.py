"""Horovod's rendezvous takes little, and from those who know its secret."""

import contextlib
import http.client
import socket
import threading
import time

import pytest

pytest.importorskip("horovod", reason="Horovod is not installed")

from keras_sparsity.launch import rendezvous  # noqa: E402
from keras_sparsity.machines.topology import topologies  # noqa: E402

HOSTS = ["here", "here"]
PLACES = topologies(HOSTS)


@pytest.fixture
def serve():
    """`serve(**options)` gives `ask(method, path, body)` of a server."""
    with contextlib.ExitStack() as stack:

        def start(**options):
            address, port = stack.enter_context(
                rendezvous.served(HOSTS, PLACES, **options)
            )
            # As Horovod's C++ makes it.
            base, _, prefix = f"{address}:{port}".partition("/")

            def ask(method, path, body=None, prefix=f"/{prefix}", headers=None):
                connection = http.client.HTTPConnection(base, timeout=10)
                with contextlib.closing(connection):
                    connection.request(
                        method, prefix + path, body, headers or {}
                    )
                    answer = connection.getresponse()
                    return answer.status, answer.read()

            ask.place = base.split(":")[0], port
            return ask

        yield start


def test_it_does_what_horovods_does(serve):
    ask = serve()
    assert ask("GET", "/global/0")[0] == 404
    for rank in range(2):
        assert ask("PUT", f"/global/{rank}", b"address")[0] == 200
    assert ask("GET", "/global/1") == (200, b"address")
    # Once all are done the group's addresses are forgotten.
    for rank in range(2):
        assert ask("DELETE", f"/global/{rank}")[0] == 200
    assert ask("GET", "/global/1")[0] == 404


@pytest.mark.parametrize("prefix", ["", "/0123456789abcdef", "/" + "0" * 38])
def test_strangers_change_and_learn_nothing(prefix, serve):
    ask = serve()
    assert ask("PUT", "/global/0", b"address")[0] == 200
    assert ask("PUT", "/global/0", b"mine", prefix)[0] == 403
    assert ask("GET", "/global/0", None, prefix) == (403, b"")
    assert ask("DELETE", "/global/0", None, prefix)[0] == 403
    # Horovod's shows the sizes of files of the folder where it runs.
    assert ask("HEAD", "/setup.py", None, prefix)[0] == 403
    assert ask("HEAD", "/setup.py")[0] == 400
    assert ask("GET", "/global/0") == (200, b"address")


@pytest.mark.parametrize("length", [str(10**12), "-1", "many", "1_0", ""])
def test_what_is_too_long(length, serve):
    ask = serve()
    headers = {"Content-Length": length}
    assert ask("PUT", "/global/0", headers=headers)[0] == 413
    assert ask("GET", "/global/0")[0] == 404


def test_too_many_keys(serve, monkeypatch):
    monkeypatch.setattr(rendezvous, "_KEYS_PER_RANK", 2)
    ask = serve()
    found = [ask("PUT", f"/scope{n}/0", b"x")[0] for n in range(6)]
    assert found == [200] * 4 + [507] * 2


def test_many_slow_connections(serve, monkeypatch):
    monkeypatch.setattr(rendezvous, "_MOST_REQUESTS", 6)
    monkeypatch.setattr(rendezvous, "_REQUEST_SECONDS", 1.0)
    ask = serve()
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(ask.place, 30))
            for _ in range(50)
        ]
        for one in slow[8:]:  # Those beyond the limit are let go.
            assert _is_ended(one)
        # A thread and a time limit for each of the others.
        assert threading.active_count() - before <= 2 * 8
        _drip(slow[:8])
        assert all(_is_ended(one) for one in slow[:8])
    assert ask("GET", "/global/0")[0] == 404


def _drip(connections):
    """Sends a byte of a request now and then, until they have ended."""

    def drip():
        left = list(connections)
        while left:
            for one in list(left):
                try:
                    one.sendall(b"G")
                except OSError:
                    left.remove(one)
            time.sleep(0.1)

    threading.Thread(target=drip, daemon=True).start()


def _is_ended(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    ("here", "listens_at"),
    [
        (None, "127.0.0.1"),
        ("127.0.0.2", "127.0.0.2"),
        # Another machine sees us there: the address was translated.
        ("192.0.2.1", "0.0.0.0"),
    ],
)
def test_where_it_listens(here, listens_at, monkeypatch):
    made = []
    init = rendezvous._Server.init

    def noted(server, places):
        made.append(server)
        init(server, places)

    monkeypatch.setattr(rendezvous._Server, "init", noted)
    with rendezvous.served(HOSTS, PLACES, here) as (address, port):
        assert made[0].socket.getsockname() == (listens_at, port)
        assert address.startswith(f"{here or '127.0.0.1'}:{port}/")
