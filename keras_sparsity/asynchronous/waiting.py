"""Waits for other workers, in sight of the watch."""

from keras_sparsity.health import journal


def noted(rank, wait):
    """The result of a function that may wait for other workers.

    If nothing goes on at any rank for longer than the timeout, the watch ends
    all of them: a worker may be alive and stand still.
    """
    notes = journal.current()
    # Of this rank alone, as others need not call anything for it to end.
    site = notes.site("a wait for", "other workers", ranks=(rank,))
    try:
        return notes.run(site, [], wait)
    except BaseException:
        site.leave([])  # Its error is no collective's.
        raise
