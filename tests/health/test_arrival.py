"""Missing ranks are named, and the process that waits for them ends."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from keras_sparsity.health import arrival


@pytest.fixture(autouse=True)
def handlers_as_before():
    """`end_when_late` ignores Ctrl-C in a process of its own; here it is ours.

    What later tests start would ignore it too.
    """
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_addresses_that_do_not_answer_are_named():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_server(("127.0.0.1", 0)) as other:
            closed = other.getsockname()[1]
        lines = arrival.unreachable(
            {
                "rank 0": f"127.0.0.1:{port}",
                "rank 1": f"127.0.0.1:{closed}",
                "rank 2": f"http://127.0.0.1:{closed}/secret",
                "rank 3": "127.0.0.1:port",
            }
        )
    assert [line.partition(" cannot")[0] for line in lines] == [
        f"rank 1 at 127.0.0.1:{closed}",
        f"rank 2 at 127.0.0.1:{closed}",
        "rank 3 at 127.0.0.1:port",
    ]


@pytest.fixture
def sleeping():
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command) as process:
        yield process
        process.kill()


def test_the_waiting_process_ends_in_time(sleeping, capsys):
    waits = []

    def is_over(seconds):
        waits.append(seconds)
        return len(waits) == 3  # after the first signal

    arrival.end_when_late(is_over, sleeping.pid, 30, {})
    assert waits == [20, 10, 2]
    assert sleeping.wait(10) == -signal.SIGALRM
    told = capsys.readouterr().err
    assert "still waiting for other ranks" in told
    assert "within the timeout of 30 s" in told


def test_nothing_is_said_of_ranks_that_arrive(capsys):
    arrival.end_when_late(lambda seconds: True, os.getpid(), 30, {})
    assert not capsys.readouterr().err
