"""Work that ranks do by themselves: if it fails on one, all of them go on."""

from keras_sparsity._tf import checks


class AttemptError(RuntimeError):
    """Work that failed on some rank; raised on all ranks."""


def attempted(communicator, work, name):
    """Does a rank's own work; every rank calls it.

    A rank that raised alone would leave the others waiting for its messages.

    Args:
        work: function without arguments, which sends nothing and whose result
            pickles; None of a rank that has nothing to do.
        name: the call's role.

    Returns:
        List of the ranks' results.

    Raises:
        AttemptError: on all ranks, with the first error of any.
    """
    result = own = None
    try:
        result = work and work()
    except Exception as error:  # whatever a user's layer raises
        own = error
    of_ranks = communicator.gather_objects(
        (result, own and described(own)), name
    )
    for rank, (_, text) in enumerate(of_ranks):
        if text is not None:
            raise AttemptError(f"On rank {rank}: {text}") from own
    return [result for result, _ in of_ranks]


def described(error):
    """An error in one line.

    Example:

    >>> described(ValueError("Too\\nlong."))
    'ValueError: Too long.'
    """
    text = checks.shortened(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"
