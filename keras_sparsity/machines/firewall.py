"""Lets only the machines of a run connect to the ports that it opens.

TensorFlow's server listens on all interfaces and asks nobody for a password:
anyone who reaches its port can read and write files as this user. The server
can share its port (SO_REUSEPORT), and Linux then runs a program of the first
socket to choose the receiver of each new connection. So a socket of ours
takes the port first and drops strangers' connections; those from loopback and
from the run's machines go on to TensorFlow. This needs no privileges and
costs established connections nothing.
"""

import contextlib
import ipaddress
import os
import socket
import stat

from keras_sparsity.machines import helper, packet_filter

VARIABLE = "KERAS_SPARSITY_ALLOWED_NETWORKS"
ANY = "any"

# Read by TensorFlow 2.3 and later.
_SHARE_VARIABLE = "TF_GRPC_REUSE_PORT"


def given_networks(variables=os.environ):
    """The networks in the environment; None for `any`.

    Raises:
        ValueError: If the variable names something else.
    """
    text = variables.get(VARIABLE, "")
    if text.strip().lower() == ANY:
        return None
    try:
        return [
            ipaddress.ip_network(part.strip(), strict=False)
            for part in text.split(",")
            if part.strip()
        ]
    except ValueError as error:
        raise ValueError(
            f"{VARIABLE} must be IP addresses or networks, separated by "
            "commas, as 10.0.0.0/8,192.168.1.5, of machines that may connect "
            f"to the ranks beside the ranks' own, or {ANY!r} for all. "
            f"Received: {text!r} ({error})."
        ) from None


@contextlib.contextmanager
def guarded_port(port, hosts, warn):
    """Lets only `hosts` connect to TensorFlow's server.

    The server must start while this is entered; the port then stays guarded
    until the process ends.

    Args:
        hosts: Names or addresses of the machines of the run.
        warn: Function of a message, called if the port stays open.

    Raises:
        OSError: If the port is in use.
    """
    networks = given_networks()
    if networks is None:
        yield
        return
    found, missing = packet_filter.resolved(hosts)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_socket_at(port))
        try:
            packet_filter.choose(first, [*networks, *found])
        except OSError as error:
            first.close()
            warn(_why_open(port, error))
            yield
            return
        first.listen(1)
        with _sharing(), _resolving(first, networks, hosts, missing):
            yield
        # All ranks have started by now, and name services know them.
        found, missing = packet_filter.resolved(hosts)
        packet_filter.choose(first, [*networks, *found])
        if missing:
            warn(
                f"{', '.join(missing)}, of other ranks, cannot be resolved "
                "here: connections from there are dropped, unless "
                f"{VARIABLE} names their addresses."
            )
        own = first.family, first.getsockname()[:2]
        # Open as long as TensorFlow's server, until the process ends.
        first.detach()
        stack.pop_all()
    for other in _listening(port):
        if other != own:
            warn(_why_open(port, f"TensorFlow listens at {other[1]}"))


def _resolving(first, networks, hosts, missing):
    """While entered, a helper process keeps resolving `missing` hosts.

    A cluster's name service may know a rank only once it runs.
    """
    if not missing:
        return contextlib.nullcontext()
    descriptor = first.fileno()
    return helper.running(
        packet_filter.keep_choosing,
        descriptor,
        list(map(str, networks)),
        hosts,
        pass_fds=[descriptor],
    )


def _socket_at(port):
    """The first socket at a port, which others may share.

    It is made as gRPC makes its own. Refused connections go to it, and it
    drops them.
    """
    made = socket.socket(socket.AF_INET6 if _has_ipv6() else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        packet_filter.drop_all(made)
        # Not shared yet, so that this fails if an earlier run has not ended.
        made.bind(("", port))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except BaseException:
        made.close()
        raise
    return made


def _has_ipv6():
    """gRPC's own condition for a socket that takes IPv6 and IPv4."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _sharing():
    """While entered, TensorFlow's server shares its port."""
    before = os.environ.get(_SHARE_VARIABLE)
    os.environ[_SHARE_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SHARE_VARIABLE]
        else:
            os.environ[_SHARE_VARIABLE] = before


def _listening(port):
    """`(family, address)` of this process's sockets that listen at a port."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # The folder's own is closed.
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                address = found.getsockname()[:2]
                is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
                listens = found.getsockopt(
                    socket.SOL_SOCKET, socket.SO_ACCEPTCONN
                )
                if is_tcp and address[1] == port and listens:
                    yield found.family, address


def _why_open(port, reason):
    return (
        f"port {port} of TensorFlow's server is open, without a password, to "
        "everyone who can reach this machine: connections cannot be "
        f"restricted here ({reason}). Train behind a firewall, or on one "
        "machine in a network of its own: unshare --map-root-user --net sh -c "
        f"'ip link set lo up && keras-sparsity run ...'. {VARIABLE}={ANY} "
        "allows everyone."
    )
