"""Ports of this machine, for processes that are about to listen there."""

import contextlib
import random
import socket

# Below the range that the system assigns to connections (32768 and up on
# Linux), so that no connection takes one before its process listens.
RANGE = range(15000, 32000)


@contextlib.contextmanager
def reserved(count):
    """Free ports, which no other caller finds free while this is entered.

    A process may listen there meanwhile, if it sets `SO_REUSEADDR`, as gRPC
    does. An error, if this machine has fewer.
    """
    candidates = list(RANGE)
    random.SystemRandom().shuffle(candidates)
    with contextlib.ExitStack() as stack:
        ports = []
        while len(ports) < count:
            if not candidates:
                raise ValueError(
                    f"{count} processes need as many free ports; of those from "
                    f"{RANGE[0]} to {RANGE[-1]} this machine has {len(ports)}."
                )
            holder = stack.enter_context(socket.socket())
            port = candidates.pop()
            with contextlib.suppress(OSError):
                holder.bind(("", port))
                # Not before, so that it fails at others' reserved ports.
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                ports.append(port)
        yield ports


def free(count):
    """As `reserved`, for processes that another machine's launcher starts."""
    with reserved(count) as ports:
        return ports
