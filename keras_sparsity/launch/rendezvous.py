"""Serves Horovod's rendezvous, where ranks exchange their addresses.

Horovod's own server accepts any request from anyone. This one listens where
the ranks reach it, limits each request, and requires a secret. The secret is
part of the address that the ranks receive, to which Horovod's client appends
the port and its path.
"""

import contextlib
import hmac
import secrets
import socket
import threading

from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import (
    RendezvousHandler,
    RendezvousHTTPServer,
)

from keras_sparsity.machines import addresses, packet_filter

# A rank sends each other one its address, some 150 bytes.
_BYTES_PER_RANK = 1024
# Each of Horovod's process sets has up to three scopes with a key for each
# rank, which are deleted once the set is complete.
_KEYS_PER_RANK = 1000
_REQUEST_SECONDS = 10.0
_MOST_REQUESTS = 128  # at a time, and one more for each rank


@contextlib.contextmanager
def served(hostnames, topologies, here=None, networks=None):
    """Serves the rendezvous while entered.

    Args:
        hostnames: The name of each rank's machine.
        topologies: The `Topology` of each rank.
        here: This machine's address for the ranks; by default loopback.
        networks: Networks of the ranks' machines; None for any.

    Yields:
        `(address, port)`, for Horovod's variables.
    """
    if ":" in (here or ""):
        raise ValueError(
            "Horovod's processes connect by IPv4. Received: hosts that see "
            f"this machine at {here}. Give it an IPv4 address that they reach, "
            "or use the native engine."
        )
    server = _Server(addresses.to_bind(here), len(topologies), networks)
    server.init(
        [
            SlotInfo(hostname, **vars(place))
            for hostname, place in zip(hostnames, topologies, strict=True)
        ]
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    try:
        yield f"{here or '127.0.0.1'}:{port}/{server.secret}", port
    finally:
        server.shutdown()
        server.server_close()


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
            packet_filter.restrict(self.socket, self._networks)
        super().server_activate()

    def process_request(self, request, client_address):
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request, client_address):
        # Each read has a limit too; this one covers the whole request.
        limit = threading.Timer(_REQUEST_SECONDS, _end, [request])
        limit.daemon = True
        limit.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            limit.cancel()
            self._free.release()

    def handle_error(self, request, client_address):
        pass  # The client has gone, or was too slow.

    def takes_another(self):
        with self.cache_lock:
            keys = sum(len(scope) for scope in self.cache.values())
        return keys < self._most_keys


class _Handler(RendezvousHandler):
    def parse_request(self):
        if not super().parse_request():
            return False
        port = self.server.server_address[1]
        # Horovod appends its path to the address, a colon and the port.
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
