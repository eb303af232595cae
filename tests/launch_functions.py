"""Functions that the launcher's tests run in other processes."""

import os
import signal
import sys
import time


def topology(*args, **kwargs):
    return os.environ["KERAS_SPARSITY_TOPOLOGY"], args, kwargs


def fail_on(rank):
    if _rank() == rank:
        raise ValueError(f"no luck on rank {rank}")
    time.sleep(30)


def kill_self(rank):
    if _rank() == rank:
        print("about to die", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)


def sleep_on(rank, seconds=60):
    if _rank() == rank:
        time.sleep(seconds)


def exit_with(code):
    sys.exit(code)


def process_id():
    return os.getpid()


def _rank():
    local_rank = os.environ["KERAS_SPARSITY_TOPOLOGY"].split(",")[0]
    return int(local_rank)
