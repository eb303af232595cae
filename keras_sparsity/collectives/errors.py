"""What went wrong between the processes, kept where every part can see it."""

import contextlib
import re

import tensorflow as tf

from keras_sparsity.collectives import journal


class CollectiveError(RuntimeError):
    """A collective that could not end: the processes no longer agree.

    Its message lists what every rank called, where that is known.
    """


_failure = None
_inquire = None

# What the engines raise for a broken connection or operations that do not
# fit. Other errors are mistakes of the caller and explain themselves.
_BROKEN = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)


def failure():
    """Returns the first failure found between the processes, or None."""
    return _failure


def record_failure(message):
    """Keeps `message`, unless an earlier failure (the cause) is known."""
    global _failure
    if _failure is None:
        _failure = message


def set_inquiry(inquire):
    """Sets the function that finds out why an operation has failed.

    Args:
        inquire: Function of the error that returns, soon, when the failure
            behind it is recorded, or none is found.
    """
    global _inquire
    _inquire = inquire


def explain(error, call="a collective"):
    """The error to show to the user for `error`.

    An engine only knows that its connection broke or that operations did not
    fit. What the ranks know of each other says why.

    Args:
        error: Any exception.
        call: What was called, for the message.

    Returns:
        `CollectiveError`, if a collective failed, else `error` itself.
    """
    if not isinstance(error, tf.errors.OpError):
        return error
    is_collectives = _is_collectives(error)
    if _failure is None and _inquire is not None and is_collectives:
        _inquire(error)
    open_calls = journal.current().forget_open()
    if _failure is not None:
        return CollectiveError(_failure)
    if is_collectives and open_calls:
        calls = ", ".join(map(str, open_calls))
        return CollectiveError(f"{call} failed in {calls}: {error.message}")
    return error


@contextlib.contextmanager
def explained(call="a collective"):
    """Raises what `explain` makes of an error raised inside.

    Args:
        call: What is called inside, for the message.

    Raises:
        CollectiveError: In place of TensorFlow's error of a collective.
    """
    try:
        yield
    except tf.errors.OpError as error:
        explanation = explain(error, call)
        if explanation is error:
            raise
        raise explanation from None


def _is_collectives(error):
    # TensorFlow 2.18 tells where each operation was made: without those
    # lines, which name this package's files.
    message = "\n".join(
        line
        for line in (error.message or "").splitlines()
        if not line.lstrip().startswith("File ")
    )
    if "assertion failed" in message:  # of ids, say: no collective's own
        return False
    if re.search("collective|horovod", message, re.IGNORECASE):
        return True
    return isinstance(error, _BROKEN) and bool(journal.current().open_sites())
