"""The addresses of this machine."""

import contextlib
import errno
import ipaddress
import os
import re
import socket


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


def to_bind(here):
    """The address to listen at, to be reached at `here`.

    That one if this machine has it, else all of its own; loopback for None.
    """
    if here is None:
        return "127.0.0.1"
    family = socket.AF_INET6 if ":" in here else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((here, 0))
        except OSError as error:
            # Address translation gives the ranks another one.
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return ""
    return here
