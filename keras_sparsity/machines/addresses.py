"""The addresses of this machine."""

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import struct

# `SIOCGIFADDR`, of Linux's bits/ioctls.h.
_GET_ADDRESS = 0x8915


def of_interfaces():
    """The addresses of this machine's interfaces, except loopback."""
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


def towards(host):
    """This machine's address towards a host; None if that has no route.

    Connecting a datagram socket sends nothing: it asks the system for the
    route.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return probe.getsockname()[0]
    except (OSError, UnicodeError):
        return None


def towards_launcher():
    """This machine's addresses towards the launcher, which all ranks reach."""
    found = []
    for variable in ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "MASTER_ADDR"):
        # A port and a secret may follow.
        launcher = re.split("[:/]", os.environ.get(variable, ""))[0]
        own = towards(launcher) if launcher else None
        found += [own] if own else []
    return found


def interface(address):
    """The name of the interface that has an IPv4 address, or None."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            with contextlib.suppress(OSError):  # It has no address.
                answer = fcntl.ioctl(probe, _GET_ADDRESS, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def to_bind(here):
    """The address to listen at, to be reached at `here`.

    That one if this machine has it, else all of its own; loopback for None.
    """
    if here is None:
        return "127.0.0.1"
    family = socket.AF_INET6 if ":" in here else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((here, 0))
    except OSError:
        # Address translation gives the ranks another one.
        return "::" if family == socket.AF_INET6 else ""
    return here
