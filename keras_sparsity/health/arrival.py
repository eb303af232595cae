"""Ends a process whose engine waits for ranks that never start.

TensorFlow and Horovod wait for an hour or without limit. `end_when_late` runs
in a helper process (`machines/helper.py`), so this file imports the standard
library alone.
"""

import concurrent.futures
import os
import signal
import socket
import sys
import urllib.error
import urllib.parse
import urllib.request

# Ranks that are started together have arrived by then.
_HINT_SECONDS = 20.0
_PROBE_SECONDS = 2.0
# Defined in machines/firewall.py.
_NETWORKS_VARIABLE = "KERAS_SPARSITY_ALLOWED_NETWORKS"


def end_when_late(is_over, pid, timeout_seconds, addresses):
    """Names the missing ranks on stderr and ends process `pid` in time.

    Args:
        is_over: See `helper.running`.
        pid: The waiting process.
        timeout_seconds: How long it may wait.
        addresses: See `unreachable`.
    """
    # Ctrl-C ends that process, and `is_over` then ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hint_seconds = min(_HINT_SECONDS, timeout_seconds)
    if is_over(hint_seconds):
        return
    if timeout_seconds > hint_seconds:
        _say("still waiting for other ranks to start.", addresses)
        if is_over(timeout_seconds - hint_seconds):
            return
    _say(
        "the ranks have not found each other within the timeout of "
        f"{timeout_seconds:g} s (KERAS_SPARSITY_TIMEOUT).",
        addresses,
    )
    # Not SIGTERM, which TensorFlow catches.
    for number in (signal.SIGALRM, signal.SIGKILL):
        os.kill(pid, number)
        if is_over(2):
            return


def unreachable(addresses):
    """A line for each address that does not answer.

    Args:
        addresses: dict from a name, as "rank 1", to its "host:port", or to
            the http address of an entry that exists once it has arrived.
    """
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        problems = list(pool.map(_problem, addresses.values()))
    return [
        f"{name} {problem}"
        for name, problem in zip(addresses, problems, strict=True)
        if problem
    ]


def _problem(address):
    # Without the secret in an http address's path.
    shown = urllib.parse.urlsplit(address).netloc or address
    try:
        if address.startswith("http:"):
            urllib.request.urlopen(address, timeout=_PROBE_SECONDS).close()
        else:
            host, _, port = address.rpartition(":")
            socket.create_connection(
                (host.strip("[]"), int(port)), timeout=_PROBE_SECONDS
            ).close()
    except urllib.error.HTTPError as error:
        return f"has not come ({shown} has no entry for it: {error})"
    except TimeoutError as error:
        return (
            f"at {shown} cannot be reached: {error}. Its machine is down or "
            "refuses this machine's connections: check its firewall and "
            f"{_NETWORKS_VARIABLE} there"
        )
    except (OSError, ValueError) as error:
        return f"at {shown} cannot be reached: {error}"
    return None


def _say(problem, addresses):
    lines = unreachable(addresses) or [
        "All known addresses have answered. Either another program listens "
        "at one of them, or the ranks were given different addresses, or "
        "address translation changes the ranks' own: name the translated "
        f"addresses in {_NETWORKS_VARIABLE}."
    ]
    text = "\n".join([f"\nkeras_sparsity: {problem}", *lines])
    print(text, file=sys.stderr, flush=True)
