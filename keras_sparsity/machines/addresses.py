"""The addresses of this machine."""

import contextlib
import ipaddress
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
