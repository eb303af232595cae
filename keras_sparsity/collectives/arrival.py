"""Ends a process whose engine waits for ranks that do not come.

TensorFlow and Horovod wait for them for an hour or for ever, and cannot be
interrupted meanwhile.
"""

import concurrent.futures
import contextlib
import os
import socket
import sys
import threading

# Ranks that are started together have come by then.
_HINT_SECONDS = 20.0
_PROBE_SECONDS = 2.0


@contextlib.contextmanager
def expected(timeout_seconds, find_missing):
    """While entered, says who is missing, and ends this process in time.

    Args:
        timeout_seconds: How long to wait.
        find_missing: Function that returns lines on who has not come.
    """
    is_over = threading.Event()

    def wait():
        hint_seconds = min(_HINT_SECONDS, timeout_seconds)
        if is_over.wait(hint_seconds):
            return
        if timeout_seconds > hint_seconds:
            _say("still waiting for other ranks to start.", find_missing())
            if is_over.wait(timeout_seconds - hint_seconds):
                return
        _say(
            "the ranks have not found each other within the timeout of "
            f"{timeout_seconds:g} s (KERAS_SPARSITY_TIMEOUT).",
            find_missing(),
        )
        os._exit(1)  # The main thread hears nothing where it is.

    threading.Thread(
        target=wait, name="keras_sparsity arrival", daemon=True
    ).start()
    try:
        yield
    finally:
        is_over.set()


def unreachable(addresses):
    """Lines on what does not answer.

    Args:
        addresses: dict from a name, as "rank 1", to its "host:port".
    """
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        problems = list(pool.map(_problem, addresses.values()))
    return [
        f"{name} at {address} cannot be reached: {problem}"
        for (name, address), problem in zip(
            addresses.items(), problems, strict=True
        )
        if problem
    ]


def _problem(address):
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection(
            (host.strip("[]"), int(port)), timeout=_PROBE_SECONDS
        ).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _say(what, lines):
    if not lines:
        lines = [
            "All addresses answer: another program may have one of them, or "
            "the ranks were not given the same ones."
        ]
    text = "\n".join([f"\nkeras_sparsity: {what}", *lines])
    print(text, file=sys.stderr, flush=True)
