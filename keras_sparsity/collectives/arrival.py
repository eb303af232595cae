"""Ends a process whose engine waits for ranks that do not come.

TensorFlow and Horovod wait for them for an hour or for ever. TensorFlow holds
Python's lock meanwhile, so no thread of the process could end it: a helper
process does, for as long as the engine starts. It runs this file, which
therefore imports nothing but the standard library.
"""

import concurrent.futures
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request

# Ranks that are started together have come by then.
_HINT_SECONDS = 20.0
_PROBE_SECONDS = 2.0
# That of firewall.py.
_NETWORKS_VARIABLE = "KERAS_SPARSITY_ALLOWED_NETWORKS"


@contextlib.contextmanager
def expected(timeout_seconds, addresses):
    """While entered, says who is missing, and ends this process in time.

    Args:
        timeout_seconds: How long to wait.
        addresses: See `unreachable`.
    """
    call = json.dumps([os.getpid(), timeout_seconds, addresses])
    helper = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE
    )
    # Not as an argument, which every user of the machine may read: there are
    # secrets in addresses. The helper's input ends with this process.
    with contextlib.suppress(BrokenPipeError):
        helper.stdin.write(f"{call}\n".encode())
        helper.stdin.flush()
    try:
        yield
    finally:
        helper.kill()
        helper.stdin.close()
        helper.wait()


def unreachable(addresses):
    """Lines on what does not answer.

    Args:
        addresses: dict from a name, as "rank 1", to its "host:port", or to
            the http address of something that is there once it has come.
    """
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        problems = list(pool.map(_problem, addresses.values()))
    return [
        f"{name} {problem}"
        for name, problem in zip(addresses, problems, strict=True)
        if problem
    ]


def _problem(address):
    # Of an http address what may be shown.
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
        return f"has not come ({shown} has not heard of it: {error})"
    except TimeoutError as error:
        return (
            f"at {shown} cannot be reached: {error}. Its machine is down, or "
            "does not take connections from this one: a firewall, or "
            f"{_NETWORKS_VARIABLE} there"
        )
    except (OSError, ValueError) as error:
        return f"at {shown} cannot be reached: {error}"
    return None


def _help(pid, timeout_seconds, addresses):
    """The helper: ends process `pid` when the time is over."""
    # That process ends by Ctrl-C, and the helper's input with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hint_seconds = min(_HINT_SECONDS, timeout_seconds)
    if _is_over(hint_seconds):
        return
    if timeout_seconds > hint_seconds:
        _say("still waiting for other ranks to start.", addresses)
        if _is_over(timeout_seconds - hint_seconds):
            return
    _say(
        "the ranks have not found each other within the timeout of "
        f"{timeout_seconds:g} s (KERAS_SPARSITY_TIMEOUT).",
        addresses,
    )
    # Not SIGTERM, which TensorFlow catches.
    for number in (signal.SIGALRM, signal.SIGKILL):
        os.kill(pid, number)
        if _is_over(2):
            return


def _is_over(seconds):
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def _say(what, addresses):
    lines = unreachable(addresses) or [
        "Whatever could be asked has answered: another program may have one "
        "of the addresses, or the ranks were not given the same ones, or they "
        "connect from other addresses than these (address translation): name "
        f"those in {_NETWORKS_VARIABLE}."
    ]
    text = "\n".join([f"\nkeras_sparsity: {what}", *lines])
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    # Not through a buffer, of which `select` knows nothing.
    first_line = b""
    while not first_line.endswith(b"\n"):
        first_line += os.read(0, 1) or sys.exit()
    _help(*json.loads(first_line))
