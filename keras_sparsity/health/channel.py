"""Connections from every rank to one of them, independent of the engine.

Messages are JSON, not pickles, from processes that prove to know a secret,
which the engine has distributed. The port closes when all ranks have
connected.
"""

import contextlib
import json
import os
import queue
import secrets
import socket
import threading
import time
from multiprocessing import connection

from keras_sparsity.machines import addresses, settings

# The name of a process that decides and is no rank, see `watch.move`.
NO_RANK = "The scheduler"
# All ranks connect at the same time, right after a collective.
_CONNECT_SECONDS = 60.0
# From a connection to the proof of the secret: two messages each way.
_HANDSHAKE_SECONDS = 10.0
# Limit of simultaneous handshakes, beyond which the oldest end. A rank's takes
# milliseconds, so it is not among the oldest.
_MOST_HANDSHAKES = 128

_AS_SERVER = (connection.deliver_challenge, connection.answer_challenge)
_AS_CLIENT = (connection.answer_challenge, connection.deliver_challenge)
# Errors of a handshake with a stranger. (Python 3.10 checks by `assert`.)
_NOT_OURS = (
    OSError,
    EOFError,
    ValueError,
    AssertionError,
    connection.AuthenticationError,
)


class Channel:
    """One end of a connection; any thread may send, one receives."""

    def __init__(self, raw):
        self._raw = raw
        self._lock = threading.Lock()
        # A forked child must not keep the connection of an ended process open.
        os.register_at_fork(after_in_child=raw.close)

    def send(self, **message):
        """Sends a message; False if the other end has closed."""
        data = json.dumps(message).encode()
        try:
            with self._lock:
                self._raw.send_bytes(data)
        except (OSError, ValueError):
            return False
        return True

    def receive(self):
        """The next message, or None if the other end has closed."""
        try:
            return json.loads(self._raw.recv_bytes())
        except (OSError, EOFError):
            return None

    def poll(self, seconds):
        """Whether a message, or the end, arrives within `seconds`."""
        try:
            return self._raw.poll(seconds)
        except OSError:
            return True

    def fileno(self):
        return self._raw.fileno()

    def close(self):
        self._raw.close()


def connect(rank, size, gather_objects, root=0):
    """Connects every rank with the root. A collective call.

    Returns:
        This rank's `Channel` to the root; on the root a dict of the `Channel`
        to each rank, else None; and whether all ranks are on one machine.
    """
    one_machine = len(set(gather_objects(_place(), "watch/place"))) == 1
    server = offer = None
    if rank == root:
        server, hosts = listen(one_machine, size, root)
        offer = _facts(server, hosts)
    offer = gather_objects(offer, "watch/address")[root]
    if rank != root:
        return call(offer, rank, f"Rank {root}"), None, one_machine
    own, far = connection.Pipe()
    with server:
        others = _accept_all(server, size, offer, root)
    return Channel(own), {root: Channel(far), **others}, one_machine


def _facts(server, hosts):
    """How a process connects; of the types of JSON."""
    port, secret = server.getsockname()[1], secrets.token_hex(32)
    return {"hosts": hosts, "port": port, "secret": secret}


class Door:
    """Lets processes that know its secret connect, until it is closed.

    Args:
        server: The listening socket.
        hosts: Names or addresses at which others reach it.
        admit: Function of a rank and its `Channel`, called in a thread.

    Attributes:
        facts: For `call`.
    """

    def __init__(self, server, hosts, admit):
        self.facts = _facts(server, hosts)
        self._server, self._admit = server, admit
        self._handshakes = _Handshakes(server, self.facts).__enter__()
        threading.Thread(
            target=self._hear, name="keras_sparsity admission", daemon=True
        ).start()

    def _hear(self):
        while agreed := self._handshakes.agreed.get():
            self._admit(*agreed)

    def close(self):
        self._handshakes.__exit__()
        self._handshakes.agreed.put(None)
        self._server.close()


def listen(one_machine, size, rank):
    """`(listening socket, addresses)`, for ranks of one machine or several."""
    backlog = size + _MOST_HANDSHAKES
    if one_machine:
        hosts = ["127.0.0.1"]
        return socket.create_server(("127.0.0.1", 0), backlog=backlog), hosts
    if socket.has_dualstack_ipv6():
        server = socket.create_server(
            ("::", 0),
            family=socket.AF_INET6,
            backlog=backlog,
            dualstack_ipv6=True,
        )
    else:
        server = socket.create_server(("", 0), backlog=backlog)
    return server, _own_addresses(rank)


def _place():
    """Equal for the processes of one machine and network namespace."""
    place = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            if os.path.islink(path):
                place.append(os.readlink(path))
            else:
                with open(path) as file:
                    place.append(file.read().strip())
        except OSError:  # not Linux
            pass
    return tuple(place)


def _own_addresses(rank):
    """The possible addresses of this machine, of a rank, for others."""
    hosts = []
    for *_, address in settings.cluster()[rank : rank + 1]:
        hosts.append(address.rpartition(":")[0].strip("[]"))
    hosts += addresses.towards_launcher()
    if os.environ.get("HOROVOD_HOSTNAME"):
        hosts.append(os.environ["HOROVOD_HOSTNAME"])
    # Under MPI others may not know the machine's name.
    hosts += [socket.gethostname(), *addresses.of_interfaces()]
    return list(dict.fromkeys(hosts))


def call(facts, rank, name, seconds=_CONNECT_SECONDS):
    """The `Channel` of a rank to a process that listens.

    Args:
        facts: `Door.facts` of that process.
        rank: The number of the rank that calls.
        name: Of the one that listens, for the message.
        seconds: How long to try.

    Raises:
        RuntimeError: If it cannot be reached so long.
    """
    end = time.monotonic() + seconds
    hosts, port, errors = facts["hosts"], facts["port"], {}
    while time.monotonic() < end:
        for host in hosts:
            try:
                with socket.create_connection((host, port), timeout=5) as raw:
                    return _agreed(
                        raw,
                        facts,
                        _AS_CLIENT,
                        lambda channel: channel.send(rank=rank),
                    )[0]
            except _NOT_OURS as error:
                errors[host] = error
        time.sleep(0.2)
    raise RuntimeError(
        f"{name} could not be reached at port {port} of its addresses: "
        f"{errors}. The ranks connect to it to learn of each other's failures. "
        "Give the machines names that resolve on all of them, and allow TCP "
        "connections between them."
    )


def _accept_all(server, size, facts, root):
    channels = {}
    end = time.monotonic() + _CONNECT_SECONDS + 10
    with _Handshakes(server, facts) as handshakes:
        while len(channels) < size - 1:
            try:
                left = max(0, end - time.monotonic())
                rank, channel = handshakes.agreed.get(timeout=left)
            except queue.Empty:
                missing = sorted({*range(size)} - {root, *channels})
                raise RuntimeError(
                    f"Ranks {missing} did not connect to rank {root}."
                ) from None
            if rank in channels:  # The rank has tried again.
                channels[rank].close()
            channels[rank] = channel
    return channels


class _Handshakes:
    """Accepts connections while entered, each in a thread of its own.

    So slow or silent strangers keep no rank waiting.

    Attributes:
        agreed: Queue of `(rank, Channel)` of processes that know the secret.
    """

    def __init__(self, server, facts):
        self.agreed = queue.SimpleQueue()
        self._server = server
        self._facts = facts
        self._pending = {}  # from socket to True, the oldest first
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._accept, name="keras_sparsity door", daemon=True
        )

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._is_over.set()
        _shut(self._server)  # `accept` fails then.
        self._thread.join()
        with self._lock:
            while self._pending:
                self._end_oldest()

    def _accept(self):
        while not self._is_over.is_set():
            try:
                raw, _ = self._server.accept()
            except OSError:  # a closed connection, or the end
                self._is_over.wait(0.05)
                continue
            with self._lock:
                self._pending[raw] = True
                if len(self._pending) > _MOST_HANDSHAKES:
                    self._end_oldest()
            threading.Thread(
                target=self._hear, args=(raw,), daemon=True
            ).start()

    def _end_oldest(self):
        oldest = next(iter(self._pending))
        del self._pending[oldest]
        _shut(oldest)

    def _hear(self, raw):
        channel = hello = None
        with raw:
            with contextlib.suppress(*_NOT_OURS):
                channel, hello = _agreed(
                    raw, self._facts, _AS_SERVER, Channel.receive
                )
            with self._lock:
                is_awaited = self._pending.pop(raw, False)
        if hello and is_awaited:
            self.agreed.put((hello["rank"], channel))
        elif channel:
            channel.close()


def _agreed(raw, facts, challenges, after):
    """Checks that a socket's other end knows the secret.

    Args:
        raw: The socket; the caller closes it.
        facts: Those of the one that listens, with the secret.
        challenges: `_AS_SERVER` or `_AS_CLIENT`.
        after: Function of the channel that ends the handshake.

    Returns:
        `(channel, after(channel))`.

    Raises:
        OSError, EOFError: If it takes too long or the other end closes.
        AuthenticationError: If the other end does not know the secret.
    """
    raw.setblocking(True)
    _notice_lost_machine(raw)
    # For the whole handshake, as a stranger may send byte by byte.
    limit = threading.Timer(_HANDSHAKE_SECONDS, _shut, [raw])
    limit.daemon = True
    ours = connection.Connection(os.dup(raw.fileno()))
    limit.start()
    try:
        for challenge in challenges:
            challenge(ours, bytes.fromhex(facts["secret"]))
        channel = Channel(ours)
        return channel, after(channel)
    except BaseException:
        ours.close()
        raise
    finally:
        limit.cancel()


def _shut(raw):
    """Ends a connection, also for threads that read from it."""
    with contextlib.suppress(OSError):  # It has ended.
        raw.shutdown(socket.SHUT_RDWR)


def _notice_lost_machine(raw):
    """Lets the kernel end a connection after 20 s of silence."""
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 20_000),  # milliseconds
    ):
        if hasattr(socket, option):  # Linux
            number = getattr(socket, option)
            raw.setsockopt(socket.IPPROTO_TCP, number, value)
