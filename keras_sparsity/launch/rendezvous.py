"""Serves Horovod's rendezvous, where ranks leave addresses for each other.

Horovod's own server takes anything from anyone. This one listens where the
ranks reach it, and takes little, from those who know a secret. The secret is
part of the address that the ranks are given: Horovod's client puts the port
and its path behind that.
"""

import contextlib
import errno
import hmac
import secrets
import socket
import threading

from horovod.runner.http.http_server import (
    RendezvousHandler,
    RendezvousHTTPServer,
)

from keras_sparsity import firewall

# A rank tells each other one its address in some 150 bytes.
_BYTES_PER_RANK = 1024
# Each group of Horovod's (process set) has up to three scopes with a key for
# each rank, which go when the group is complete.
_KEYS_PER_RANK = 1000
_REQUEST_SECONDS = 10.0
_MOST_REQUESTS = 128  # at a time, and one more for each rank


@contextlib.contextmanager
def served(places, here=None, networks=None):
    """Serves it while entered.

    Args:
        places: List of the ranks' `SlotInfo`, as Horovod has it.
        here: This machine's address as the ranks reach it; by default its
            loopback.
        networks: Where the ranks' machines are; None for anywhere.

    Yields:
        `(address, port)`, as Horovod's variables take them.
    """
    server = _Server(_address_of(here), len(places), networks)
    server.init(places)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    try:
        yield f"{here or '127.0.0.1'}:{port}/{server.secret}", port
    finally:
        server.shutdown()
        server.server_close()


def _address_of(here):
    """`here` if it is this machine's, else all of its addresses."""
    if here is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((here, 0))
        except OSError as error:
            # Behind address translation the ranks see another one.
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return ""
    return here


def _end(request):
    with contextlib.suppress(OSError):  # It has ended.
        request.shutdown(socket.SHUT_RDWR)


class _Server(RendezvousHTTPServer):
    daemon_threads = True
    request_queue_size = _MOST_REQUESTS

    def __init__(self, address, num_ranks, networks):
        self.secret = secrets.token_hex(16)
        self.most_bytes = (1 + num_ranks) * _BYTES_PER_RANK
        self._most_keys = num_ranks * _KEYS_PER_RANK
        self._networks = networks
        self._free = threading.Semaphore(_MOST_REQUESTS + num_ranks)
        super().__init__((address, 0), _Handler, 0)

    def server_activate(self):
        if self._networks is not None:
            firewall.restrict(self.socket, self._networks)
        super().server_activate()

    def process_request(self, request, client_address):
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request, client_address):
        # Each read has a limit of its own; this one is for all.
        limit = threading.Timer(_REQUEST_SECONDS, _end, [request])
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._free.release()

    def handle_error(self, request, client_address):
        pass  # The client is gone, or was too slow.

    def takes_another(self):
        with self.cache_lock:
            keys = sum(len(scope) for scope in self.cache.values())
        return keys < self._most_keys


class _Handler(RendezvousHandler):
    def parse_request(self):
        if not super().parse_request():
            return False
        port = self.server.server_address[1]
        # Horovod puts its path behind the address, a colon and the port.
        prefix = f"/{self.server.secret}:{port}/"
        given, rest = self.path[: len(prefix)], self.path[len(prefix) :]
        if not hmac.compare_digest(given.encode(), prefix.encode()):
            return self._refuse(403)
        if rest.count("/") != 1 or self.command not in ("GET", "PUT", "DELETE"):
            return self._refuse(400)
        if self.command == "PUT":
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > self.server.most_bytes:
                return self._refuse(413)
            if not self.server.takes_another():
                return self._refuse(507)
        self.path = f"/{rest}"
        return True

    def _refuse(self, status):
        self.close_connection = True
        self.send_status_code(status)
        return False
