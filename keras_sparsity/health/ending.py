"""The end of a process whose run has failed."""

import logging
import multiprocessing
import os
import signal
import sys
import threading


def end(exit_code):
    """Ends the process at once, with its children."""
    for child in multiprocessing.active_children():
        child.terminate()
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(1)
    os._exit(exit_code)


def exit_code(error):
    """The exit code of a program that an exception ends."""
    if isinstance(error, SystemExit) and isinstance(error.code, int | None):
        return error.code or 0
    if isinstance(error, KeyboardInterrupt):
        return 128 + signal.SIGINT  # as in a shell
    return 1


def _flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # closed, or None
    logging.shutdown()
