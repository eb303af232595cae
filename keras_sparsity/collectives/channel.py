"""Connections from every rank to rank 0, beside the engine's own.

Messages are JSON, not pickles, and only a process that knows the secret,
which the engine has spread, is listened to. Once all ranks have connected
nobody else can.
"""

import json
import os
import secrets
import socket
import struct
import threading
import time
from multiprocessing import connection

# All ranks come here together, from a collective: one that has not connected
# by then never will.
_CONNECT_SECONDS = 60.0

_AS_SERVER = (connection.deliver_challenge, connection.answer_challenge)
_AS_CLIENT = (connection.answer_challenge, connection.deliver_challenge)


class Channel:
    """One end of a connection; any thread may send, one receives."""

    def __init__(self, raw):
        self._raw = raw
        self._lock = threading.Lock()
        # A child that this process forks must not keep the connection open
        # when this process is gone.
        os.register_at_fork(after_in_child=raw.close)

    def send(self, **message):
        """Sends a message; False when the other end is gone."""
        data = json.dumps(message).encode()
        try:
            with self._lock:
                self._raw.send_bytes(data)
        except (OSError, ValueError):
            return False
        return True

    def receive(self):
        """The next message, or None when the other end is gone."""
        try:
            return json.loads(self._raw.recv_bytes())
        except (OSError, EOFError):
            return None

    def poll(self, seconds):
        """Whether a message, or the end, comes within `seconds`."""
        try:
            return self._raw.poll(seconds)
        except OSError:
            return True

    def fileno(self):
        return self._raw.fileno()

    def close(self):
        self._raw.close()


def connect(rank, size, gather_objects):
    """Connects every rank with rank 0. A collective call.

    Args:
        rank, size: This process among all.
        gather_objects: Function of an object and a name that returns the
            objects of all ranks.

    Returns:
        This rank's `Channel` to rank 0, and on rank 0 a dict from rank to
        the `Channel` to it, else None.
    """
    one_machine = len(set(gather_objects(_place(), "watch/place"))) == 1
    server = offer = None
    if rank == 0:
        server, hosts = _listen(one_machine, size)
        offer = hosts, server.getsockname()[1], secrets.token_bytes(32)
    hosts, port, secret = gather_objects(offer, "watch/address")[0]
    if rank != 0:
        channel = _call(hosts, port, secret)
        channel.send(rank=rank)
        return channel, None
    own, far = connection.Pipe()
    with server:
        others = _accept_all(server, size, secret)
    return Channel(own), {0: Channel(far), **others}


def _listen(one_machine, size):
    if one_machine:
        hosts = ["127.0.0.1"]
        return socket.create_server(("127.0.0.1", 0), backlog=size), hosts
    if socket.has_dualstack_ipv6():
        server = socket.create_server(
            ("::", 0),
            family=socket.AF_INET6,
            backlog=size,
            dualstack_ipv6=True,
        )
    else:
        server = socket.create_server(("", 0), backlog=size)
    return server, _own_addresses()


def _place():
    """What the processes of one machine and network have in common."""
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


def _own_addresses():
    """The addresses at which other machines may reach this one."""
    hosts = []
    cluster = json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster")
    for job in ("chief", "worker"):
        if cluster and cluster.get(job):
            hosts.append(cluster[job][0].rpartition(":")[0].strip("[]"))
            break
    # The address from which the one that started us is reached, which all
    # ranks reach; connecting a datagram socket sends nothing.
    for variable in ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "MASTER_ADDR"):
        if os.environ.get(variable):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((os.environ[variable], 9))
                hosts.append(probe.getsockname()[0])
    if os.environ.get("HOROVOD_HOSTNAME"):
        hosts.append(os.environ["HOROVOD_HOSTNAME"])
    hosts.append(socket.gethostname())
    return list(dict.fromkeys(hosts))


def _call(hosts, port, secret):
    end = time.monotonic() + _CONNECT_SECONDS
    errors = {}
    while time.monotonic() < end:
        for host in hosts:
            try:
                raw = socket.create_connection((host, port), timeout=5)
                return _agreed(raw, secret, _AS_CLIENT)
            except (OSError, EOFError, connection.AuthenticationError) as error:
                errors[host] = error
        time.sleep(0.2)
    raise RuntimeError(
        f"Rank 0 could not be reached at port {port} of any of its addresses: "
        f"{errors}. The ranks connect to it to find out about each other's "
        "failures. Give the machines names that resolve on all of them, and "
        "let TCP connections between them pass."
    )


def _accept_all(server, size, secret):
    channels = {}
    end = time.monotonic() + _CONNECT_SECONDS + 10
    server.settimeout(1.0)
    while len(channels) < size - 1:
        if time.monotonic() > end:
            missing = sorted(set(range(1, size)) - set(channels))
            raise RuntimeError(f"Ranks {missing} did not connect to rank 0.")
        try:
            raw, _ = server.accept()
            channel = _agreed(raw, secret, _AS_SERVER)
        except (OSError, EOFError, connection.AuthenticationError):
            continue  # nobody yet, or a stranger
        hello = channel.receive() if channel.poll(10) else None
        if hello:
            channels[hello["rank"]] = channel
    return channels


def _agreed(raw, secret, challenges):
    """The channel over a socket whose other end knows the secret."""
    raw.setblocking(True)
    _wait_at_most(raw, 10)
    _notice_lost_machine(raw)
    channel = connection.Connection(raw.detach())
    try:
        for challenge in challenges:
            challenge(channel, secret)
    except BaseException:
        channel.close()
        raise
    with socket.socket(fileno=os.dup(channel.fileno())) as raw:
        _wait_at_most(raw, 0)
    return Channel(channel)


def _wait_at_most(raw, seconds):
    """Lets reads of a blocking socket fail after some time; 0 for never."""
    raw.setsockopt(
        socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0)
    )


def _notice_lost_machine(raw):
    """Ends the connection when the other machine is silent for 20 s."""
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
