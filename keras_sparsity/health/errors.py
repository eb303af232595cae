"""Errors of collectives, and the failure between ranks behind them."""

import contextlib
import re

import tensorflow as tf


class CollectiveError(RuntimeError):
    """Raised when a collective cannot end, because a rank failed or differs.

    The message lists every rank's call, if known.

    Example:

    >>> raise CollectiveError("the ranks call different collectives")
    Traceback (most recent call last):
        ...
    keras_sparsity.health.errors.CollectiveError: the ranks call different ...

    References:
        Horovod's stall inspector (`horovod/common/stall_inspector.cc`).
    """


_failure = None
_journal = None
_inquire = None

# The engines' errors for a broken connection or mismatched operations. Other
# errors are the caller's mistakes and explain themselves.
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
    """The message of the first failure between the ranks, or None.

    Raises:
        Nothing: `explained` raises it.

    Example:

    >>> from keras_sparsity import collectives
    >>> collectives.failure() is None
    True

    References:
        Horovod's stall inspector (`horovod/common/stall_inspector.cc`).
    """
    return _failure


def record_failure(message):
    """Keeps `message`, unless an earlier failure, the cause, is known."""
    global _failure
    if _failure is None:
        _failure = message


def set_sources(journal, inquire=None):
    """Sets the sources of explanations.

    Args:
        inquire: Function of an error that asks the other ranks. It returns
            soon, after `record_failure` or without a result.
    """
    global _journal, _inquire
    _journal, _inquire = journal, inquire


def explain(error, call="a collective"):
    """The error to show to the user in place of `error`.

    An engine knows only that its connection broke or that operations did not
    match. The reports of all ranks say why.

    Args:
        error: Any exception.
        call: Subject of the message.

    Returns:
        `CollectiveError`, if a collective failed, else `error` itself.
    """
    if not isinstance(error, tf.errors.OpError):
        return error
    is_collectives = _is_collectives(error)
    if _failure is None and _inquire is not None and is_collectives:
        _inquire(error)
    open_calls = _journal.forget_open() if _journal else []
    if _failure is not None:
        return CollectiveError(_failure)
    if is_collectives and open_calls:
        calls = ", ".join(map(str, open_calls))
        return CollectiveError(f"{call} failed in {calls}: {error.message}")
    return error


@contextlib.contextmanager
def explained(call="a collective"):
    """Raises `CollectiveError` in place of TensorFlow's error of a collective.

    Args:
        call: Subject of the message.

    Raises:
        CollectiveError: If a collective fails inside.

    Example:

    >>> from keras_sparsity import collectives
    >>> with collectives.explained("the sum"):
    ...     total = collectives.current().all_reduce([tf.ones([])])

    References:
        Horovod's stall inspector (`horovod/common/stall_inspector.cc`).
    """
    try:
        yield
    except tf.errors.OpError as error:
        explanation = explain(error, call)
        if explanation is error:
            raise
        raise explanation from None


def core(message):
    """The line of an operation's error that states the problem."""
    around = (
        *(" ", "\t", "Detected at", "Graph execution error"),
        *("Hint:", "Traceback (most recent"),
    )
    lines = [
        line.partition("[Op:")[0].strip()
        for line in message.splitlines()
        if not line.startswith(around)
    ]
    # The problem is the last line.
    return [message.strip(), *filter(None, lines)][-1][:500]


def spelled(error):
    """The kind of an error, and its problem."""
    if isinstance(error, SystemExit):
        return f"SystemExit, by sys.exit({error.code!r})"
    is_operations = isinstance(error, tf.errors.OpError)
    text = core(error.message) if is_operations else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_collectives(error):
    # Without TensorFlow 2.18's stack of each operation, whose lines name this
    # package's files.
    message = "\n".join(
        line
        for line in (error.message or "").splitlines()
        if not line.lstrip().startswith("File ")
    )
    if "assertion failed" in message:  # a check of ids, for example
        return False
    if re.search("collective|horovod", message, re.IGNORECASE):
        return True
    is_broken = isinstance(error, _BROKEN)
    return is_broken and _journal is not None and bool(_journal.open_sites())
