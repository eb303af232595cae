"""Programs for Linux's packet filter, which choose by a packet's source.

A helper process (`machines/helper.py`) runs `keep_choosing`, so this file
imports the standard library alone.
"""

import concurrent.futures
import contextlib
import ctypes
import errno
import ipaddress
import socket
import struct

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

_RESOLVE_SECONDS = 1.0


def restrict(listening, networks):
    """Drops a socket's packets from outside of loopback and the networks.

    A kernel that cannot filter leaves the socket open.
    """
    with contextlib.suppress(OSError):
        program = _program(networks, _KEEP_PACKET, _DROP_PACKET)
        attach(listening, _SO_ATTACH_FILTER, program)


def drop_all(first):
    """Drops all packets of a socket."""
    # A kernel that cannot filter fails in `choose`, and the socket is closed.
    with contextlib.suppress(OSError):
        drop = [(_RETURN, 0, 0, _DROP_PACKET)]
        attach(first, _SO_ATTACH_FILTER, drop)


def choose(first, networks):
    """Lets the kernel choose between the first socket of a port and the next.

    Connections from loopback and the networks go to the next one, all others
    to the first.

    Raises:
        OSError: If the kernel cannot, or the program is too long.
    """
    attach(first, _SO_ATTACH_REUSEPORT_CBPF, _program(networks, 1, 0))


def keep_choosing(is_over, descriptor, networks, hosts):
    """Chooses by `hosts` too, as soon as their names are resolved.

    Args:
        is_over: See `helper.running`.
        descriptor: The first socket's file descriptor.
        networks: List of strings.
        hosts: Names or addresses.
    """
    first = socket.socket(fileno=descriptor)
    networks = [ipaddress.ip_network(network) for network in networks]
    missing = hosts
    while missing and not is_over(_RESOLVE_SECONDS):
        found, missing = resolved(hosts)
        choose(first, [*networks, *found])


def resolved(hosts):
    """`(networks of the hosts' addresses, hosts without an address yet)`."""
    hosts = list(dict.fromkeys(hosts))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = dict(zip(hosts, pool.map(_addresses, hosts), strict=True))
    return sum(found.values(), []), [h for h in hosts if not found[h]]


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


def _program(networks, yes, no):
    """Instructions: `yes` for packets from loopback or networks, else `no`."""
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
            errno.E2BIG, "too many addresses; name networks that contain them"
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
    # Unequal words jump behind the last step.
    return [
        (code, true, len(steps) - 1 - n if false is None else false, value)
        for n, (code, true, false, value) in enumerate(steps)
    ]


def attach(open_socket, option, program):
    """Attaches a program, a list of `(code, true, false, value)`."""
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
