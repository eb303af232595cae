"""What went wrong between the processes, kept where every part can see it."""

import contextlib

import tensorflow as tf


class CollectiveError(RuntimeError):
    """A collective that could not end: the processes no longer agree.

    Its message lists what every rank called, where that is known.
    """


_failure = None


def failure():
    """Returns the first failure found between the processes, or None."""
    return _failure


def record_failure(message):
    """Keeps `message`, unless an earlier failure (the cause) is known."""
    global _failure
    if _failure is None:
        _failure = message


@contextlib.contextmanager
def explained(call="a collective"):
    """Turns TensorFlow's error of a broken collective into CollectiveError.

    An engine only knows that its connection broke. The failure that another
    process reported, when there is one, says why.

    Args:
        call: What was called, for the message.

    Raises:
        CollectiveError: In place of a `tf.errors.OpError` raised inside.
    """
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        # The caller's own mistake (a failed check) explains itself.
        if _failure is None:
            raise
        raise CollectiveError(f"{call} failed: {_failure}") from error
    except tf.errors.OpError as error:
        reason = _failure or error.message
        raise CollectiveError(f"{call} failed: {reason}") from error
