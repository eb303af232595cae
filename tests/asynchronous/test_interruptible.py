"""Calls that wait in a thread."""

import os
import signal
import threading
import time

import pytest

from keras_sparsity.asynchronous.interruptible import Interruptible


class _Interrupted(Exception):
    pass


def test_signal_handlers_run_meanwhile():
    calls, done = [], threading.Event()

    def call():
        calls.append(1)
        if len(calls) == 1:
            time.sleep(0.2)  # The main thread waits by then.
            os.kill(os.getpid(), signal.SIGUSR1)
        # As TensorFlow's, it ends for no signal.
        done.wait()
        return "found"

    def handler(number, frame):
        raise _Interrupted

    waiting = Interruptible(call)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(_Interrupted):
            waiting()
    finally:
        signal.signal(signal.SIGUSR1, before)
    done.set()
    # That which was interrupted has gone on.
    assert waiting() == "found" and len(calls) == 1
    assert waiting() == "found" and len(calls) == 2


def test_errors_are_raised():
    def call():
        raise ValueError("of the call")

    waiting = Interruptible(call)
    for _ in range(2):
        with pytest.raises(ValueError, match="of the call"):
            waiting()
