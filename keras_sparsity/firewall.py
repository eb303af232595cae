"""Lets only the machines of a run connect to the ports that it opens.

TensorFlow's server listens on all interfaces and asks nobody for a password:
whoever reaches its port reads and writes files as this user. It can share the
port, though (SO_REUSEPORT), and Linux lets the first socket of a port choose,
by a program, which of them gets a new connection. So a socket of ours has the
port first and drops what comes from elsewhere; from loopback and from the
run's machines it goes on to TensorFlow. This takes no rights and costs
established connections nothing.

A process runs this file by itself, which therefore imports nothing but the
standard library.
"""

import concurrent.futures
import contextlib
import ctypes
import errno
import ipaddress
import json
import os
import re
import select
import socket
import stat
import struct
import subprocess
import sys

VARIABLE = "KERAS_SPARSITY_ALLOWED_NETWORKS"
ANY = "any"

# TensorFlow 2.3 and later; it listens on all interfaces in any case.
_SHARE_VARIABLE = "TF_GRPC_REUSE_PORT"

# From Linux's headers, which Python does not have: asm-generic/socket.h and
# linux/bpf_common.h, linux/filter.h.
_SO_ATTACH_FILTER = 26
_SO_ATTACH_REUSEPORT_CBPF = 51
_LOAD_WORD, _LOAD_BYTE = 0x20, 0x30
_AND, _SHIFT_RIGHT = 0x54, 0x74
_JUMP, _JUMP_IF_EQUAL, _RETURN = 0x05, 0x15, 0x06
_INTERFACE = -0x1000 + 8  # of the packet
_IP_HEADER = -0x100000
_SOURCE = {4: _IP_HEADER + 12, 6: _IP_HEADER + 8}
_MOST_INSTRUCTIONS = 4096
_KEEP_PACKET, _DROP_PACKET = 0xFFFFFFFF, 0

_ASK_AGAIN_SECONDS = 1.0

# They live as long as TensorFlow's server, which is as long as the process.
_sockets = []


def given_networks(variables=os.environ):
    """The networks that the environment names; None where it says `any`.

    Args:
        variables: The environment.

    Raises:
        ValueError: If it names something else.
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
            f"{VARIABLE} must be IP addresses or networks with commas "
            "between, as 10.0.0.0/8,192.168.1.5, of machines that may connect "
            f"to the ranks beside their own, or {ANY!r} for all. "
            f"Received: {text!r} ({error})."
        ) from None


@contextlib.contextmanager
def guarded_port(port, hosts, warn):
    """Lets only `hosts` connect to TensorFlow's server.

    It is to start while this is entered; from then on the port stays guarded
    until the process ends.

    Args:
        port: The server's port.
        hosts: Names or addresses of the machines of the run.
        warn: Function of a message, called where the port stays open.

    Raises:
        OSError: If the port is in use.
    """
    networks = given_networks()
    if networks is None:
        yield
        return
    found, missing = _resolved(hosts)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(_socket_at(port))
        try:
            _choose(first, [*networks, *found])
        except OSError as error:
            first.close()
            warn(_why_open(port, error))
            yield
            return
        first.listen(1)
        with _sharing(), _asking_again(first, networks, hosts, missing):
            yield
        # All ranks have come by now, and with them their names.
        found, missing = _resolved(hosts)
        _choose(first, [*networks, *found])
        if missing:
            warn(
                f"{', '.join(missing)}, of TF_CONFIG, cannot be resolved here: "
                f"connections from there are dropped, unless {VARIABLE} names "
                "their addresses."
            )
        _sockets.append(first)
        stack.pop_all()
    for other in _listening(port):
        if other != (first.family, first.getsockname()[:2]):
            warn(_why_open(port, f"TensorFlow listens at {other[1]}"))


def restrict(listening, networks):
    """Drops what comes to a socket from elsewhere than loopback and networks.

    Where the kernel cannot do so, nothing changes.
    """
    with contextlib.suppress(OSError):
        program = _program(networks, _KEEP_PACKET, _DROP_PACKET)
        _attach(listening, _SO_ATTACH_FILTER, program)


def own_addresses():
    """The addresses of this machine's interfaces, but for loopback."""
    with contextlib.suppress(OSError):
        with open("/proc/net/fib_trie") as file:
            found = re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", file.read())
        with contextlib.suppress(OSError), open("/proc/net/if_inet6") as file:
            for line in file:
                address = ipaddress.IPv6Address(bytes.fromhex(line.split()[0]))
                found.append(str(address))
        return sorted(
            {a for a in found if not ipaddress.ip_address(a).is_loopback}
        )
    return []


def _socket_at(port):
    """The first socket at a port, as gRPC would make it, and others may share.

    It gets the connections that are refused: none of them reaches it.
    """
    made = socket.socket(socket.AF_INET6 if _has_ipv6() else socket.AF_INET)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        _drop_all(made)
        # Alone, so that an earlier run that has not ended is noticed.
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


def _drop_all(first):
    # Where it cannot be, neither can the choice, and the socket goes.
    with contextlib.suppress(OSError):
        drop = [(_RETURN, 0, 0, _DROP_PACKET)]
        _attach(first, _SO_ATTACH_FILTER, drop)


def _choose(first, networks):
    """Has the kernel choose between our socket (0) and TensorFlow's (1)."""
    _attach(first, _SO_ATTACH_REUSEPORT_CBPF, _program(networks, 1, 0))


def _program(networks, yes, no):
    """Instructions that return `yes` for packets of loopback or networks."""
    sections = {
        version: [
            step
            for network in ipaddress.collapse_addresses(
                n for n in networks if n.version == version
            )
            for step in _matches(network, yes)
        ]
        + [(_RETURN, 0, 0, no)]
        for version in (4, 6)
    }
    program = [
        (_LOAD_WORD, 0, 0, _INTERFACE),
        (_JUMP_IF_EQUAL, 0, 1, socket.if_nametoindex("lo")),
        (_RETURN, 0, 0, yes),
        (_LOAD_BYTE, 0, 0, _IP_HEADER),
        (_SHIFT_RIGHT, 0, 0, 4),  # leaves the version
        (_JUMP_IF_EQUAL, 1, 0, 4),
        (_JUMP, 0, 0, len(sections[4])),
        *sections[4],
        *sections[6],
    ]
    if len(program) > _MOST_INSTRUCTIONS:
        raise OSError(
            errno.E2BIG,
            f"too many addresses; name networks that hold them in {VARIABLE}",
        )
    return program


def _matches(network, yes):
    """Instructions that return `yes` for a source in the network."""
    steps = []
    address, mask = network.network_address.packed, network.netmask.packed
    for offset in range(0, len(mask), 4):
        (bits,) = struct.unpack_from(">I", mask, offset)
        (word,) = struct.unpack_from(">I", address, offset)
        if bits:
            steps.append((_LOAD_WORD, 0, 0, _SOURCE[network.version] + offset))
            if bits != 0xFFFFFFFF:
                steps.append((_AND, 0, 0, bits))
            steps.append((_JUMP_IF_EQUAL, 0, None, word))
    steps.append((_RETURN, 0, 0, yes))
    # What is not equal goes on behind the last of them.
    return [
        (code, true, len(steps) - 1 - n if false is None else false, value)
        for n, (code, true, false, value) in enumerate(steps)
    ]


def _attach(open_socket, option, program):
    code = b"".join(
        struct.pack("HBBI", code, true, false, value & 0xFFFFFFFF)
        for code, true, false, value in program
    )
    buffer = ctypes.create_string_buffer(code, len(code))
    open_socket.setsockopt(
        socket.SOL_SOCKET,
        option,
        struct.pack("@HP", len(program), ctypes.addressof(buffer)),
    )


def _resolved(hosts):
    """`(networks of the hosts' addresses, hosts that have none yet)`."""
    networks, missing = [], []
    hosts = list(dict.fromkeys(hosts))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for host, addresses in zip(
            hosts, pool.map(_addresses, hosts), strict=True
        ):
            networks += addresses
            if not addresses:
                missing.append(host)
    return networks, missing


def _addresses(host):
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    addresses = [
        ipaddress.ip_address(entry[4][0].partition("%")[0]) for entry in found
    ]
    return [
        ipaddress.ip_network(getattr(a, "ipv4_mapped", None) or a)
        for a in addresses
    ]


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


@contextlib.contextmanager
def _asking_again(first, networks, hosts, missing):
    """While entered, a process asks for addresses that are `missing`.

    A cluster's name service may know a rank only once it runs. TensorFlow
    holds Python's lock while it waits for the ranks.
    """
    if not missing:
        yield
        return
    call = json.dumps([first.fileno(), [str(n) for n in networks], hosts])
    # Its input ends with this process.
    helper = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, call],
        stdin=subprocess.PIPE,
        pass_fds=[first.fileno()],
    )
    try:
        yield
    finally:
        helper.kill()
        helper.stdin.close()
        helper.wait()


def _ask_again(descriptor, networks, hosts):
    """The process's part."""
    first = socket.socket(fileno=descriptor)
    networks = [ipaddress.ip_network(network) for network in networks]
    missing = hosts
    while missing:
        if select.select([sys.stdin], [], [], _ASK_AGAIN_SECONDS)[0]:
            return
        found, missing = _resolved(hosts)
        _choose(first, [*networks, *found])


def _listening(port):
    """`(family, address)` of this process's sockets that listen at a port."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # The folder's own is closed.
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as found:
                address = found.getsockname()[:2]
                is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
                if is_tcp and address[1] == port and _is_listening(found):
                    yield found.family, address


def _is_listening(found):
    return found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _why_open(port, reason):
    return (
        f"port {port} of TensorFlow's server is open to everyone who can "
        f"reach this machine, without a password: connections cannot be "
        f"restricted here ({reason}). Train behind a firewall, or on one "
        "machine in a network of its own: unshare --map-root-user --net sh -c "
        f"'ip link set lo up && keras-sparsity run ...'. {VARIABLE}={ANY} "
        "says that it may be open."
    )


if __name__ == "__main__":
    _ask_again(*json.loads(sys.argv[1]))
